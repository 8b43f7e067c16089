"""YAML values; the schemas they fill are dataclasses beside the code that uses them."""
