"""Which results may be compared: their settings, and the names of their rows.

Results compare only within one setting: target, machine, prompts, limits and sampling. There, one
of more repeats stands in place of what it measured again.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from headstart.eval.result import Result

Named = tuple[str, Result]
"""A result with the name that its rows carry."""


@dataclass(frozen=True)
class Setting:
    """Results that may be compared."""

    label: str
    """Its prompts, its temperature and whatever else tells it from the other settings."""
    told: str
    """All that its results have in common."""
    rows: list[Named]
    again: list[str]
    """Sentences on the rows that stand in place of others with fewer repeats."""


def settings_of(results: Sequence[Result]) -> list[Setting]:
    """Group results that may be compared; of one drafter measured again, the most repeats stand."""
    kept, fewer = most_repeated(results)
    groups = by_setting(name_results(kept))
    labels = setting_labels(list(groups.values()))
    return [
        Setting(label, told, rows, _again(rows, fewer))
        for label, (told, rows) in zip(labels, groups.items(), strict=True)
    ]


def most_repeated(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Part results into those that stand, and the same drafter's in a run of fewer repeats."""
    most: dict[tuple, int] = {}
    for result in results:
        key = _same(result)
        most[key] = max(result.repeats, most.get(key, 0))
    kept = [r for r in results if r.repeats == most[_same(r)]]
    return kept, [r for r in results if r.repeats < most[_same(r)]]


def _same(result: Result) -> tuple:
    """Return what agrees where one result measures again what another did."""
    seed = result.sampling.seed if result.sampling.temperature > 0 else None
    return _setting(result), astuple(result.drafter), seed


def _again(rows: Sequence[Named], fewer: Sequence[Result]) -> list[str]:
    found: dict[tuple[int, int], list[str]] = {}
    for name, result in rows:
        for repeats in sorted({old.repeats for old in fewer if _same(old) == _same(result)}):
            found.setdefault((result.repeats, repeats), []).append(name)
    return [
        f"Measured again in a run of their own, with {new} repeats in place of {old}: "
        f"{', '.join(names)}."
        for (new, old), names in found.items()
    ]


def name_results(results: Sequence[Result]) -> list[Named]:
    """Pair each result with its drafter's name.

    Where one setting has a drafter several times, its name is followed by the seed that tells
    sampled results apart, or else by a number.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for i, result in enumerate(results):
        places.setdefault((_setting(result), result.drafter.name), []).append(i)
    names = [result.drafter.name for result in results]
    for found in places.values():
        tails = _tails([results[i] for i in found])
        for i, tail in zip(found, tails, strict=True):
            names[i] += tail
    return list(zip(names, results, strict=True))


def _tails(same: Sequence[Result]) -> list[str]:
    if len(same) == 1:
        return [""]
    seeds = [result.sampling.seed for result in same]
    if same[0].sampling.temperature > 0 and len(set(seeds)) == len(seeds):
        return [f" (seed {seed})" for seed in seeds]
    return [f" #{number}" for number in range(1, len(same) + 1)]


def by_setting(named: Sequence[Named]) -> dict[str, list[Named]]:
    """Group named results by all that must agree between results that are compared."""
    groups: dict[str, list[Named]] = {}
    for name, result in named:
        groups.setdefault(_setting(result), []).append((name, result))
    return groups


def setting_labels(groups: Sequence[Sequence[Named]]) -> list[str]:
    """Name each setting by its prompts, its temperature and whatever else tells it apart."""
    first = [group[0][1] for group in groups]
    parts = [_parts(r) | prompts for r, prompts in zip(first, _short_prompts(first), strict=True)]
    told = {key for key in parts[0] if key in _ALWAYS or len({part[key] for part in parts}) > 1}
    return [", ".join(part[key] for key in part if key in told) for part in parts]


_ALWAYS = ("prompts", "temperature")


def _short_prompts(results: Sequence[Result]) -> list[dict[str, str]]:
    """Tell suites apart by their names; else by their sizes; else by their hashes."""
    where = [(r.provenance.prompt_suite, r.provenance.prompt_suite_hash) for r in results]
    names, hashes = ({of[i] for of in where} for i in (0, 1))
    sizes = {(hashed, r.counts.prompts) for (_, hashed), r in zip(where, results, strict=True)}
    members = [name.split("+") for name, _ in where]
    shared = len(names) == 1 and len(members[0]) > 1  # of no use in every label
    told = [f"{len(of)} suites" if shared else "+".join(of) for of in members]
    if len(names) == len(hashes):
        apart = [""] * len(results)
    elif len({size for _, size in sizes}) == len(sizes):
        apart = [f"{r.counts.prompts} prompts" for r in results]
    else:
        apart = [hashed[:8] for _, hashed in where]
    return [{"prompts": one, "suite": other} for one, other in zip(told, apart, strict=True)]


def _setting(result: Result) -> str:
    p = _parts(result)
    return (
        f"{p['target']} on {p['device']}, {p['threads']}, {p['dtype']}, {p['runtime']}, "
        f"{p['batch']}, {p['passes']}; prompts "
        f"{p['prompts']} ({p['suite']}), {p['template']}; {p['temperature']}, {p['top_p']}, "
        f"{p['top_k']}, {p['limit']}, {p['eos_policy']}"
    )


def _parts(result: Result) -> dict[str, str]:
    """Return what must agree between results that are compared, the prompts first."""
    p, s, made = result.provenance, result.sampling, result.compilation
    bound = s.max_pass_tokens
    return {
        "prompts": p.prompt_suite,
        "temperature": f"temperature {s.temperature:g}",
        "target": f"{p.target} (fingerprint {p.target_fingerprint[:8]})",
        "device": p.device,
        "threads": f"{p.threads} threads",
        "dtype": p.dtype,
        "runtime": f"runtime {'eager' if made is None else 'compiled ' + '+'.join(made.parts)}",
        "batch": f"batch {s.batch}",
        "passes": f"passes of {'any size' if bound is None else f'at most {bound} tokens'}",
        "suite": p.prompt_suite_hash[:8],
        "template": f"template {p.template_hash[:8]}",
        "top_p": f"top_p {s.top_p:g}",
        "top_k": f"top_k {s.top_k}",
        "limit": f"at most {s.limits or s.max_new_tokens} new tokens",
        "eos_policy": f"eos_policy {s.eos_policy}",
    }
