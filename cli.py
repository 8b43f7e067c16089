"""The dispatcher: `headstart COMMAND [overrides]`, every command a Hydra application over conf/.

Overrides are composed and validated before Hydra makes a directory, so that a mistyped option is
one sentence and leaves nothing behind.
"""

import difflib
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from headstart import jobs, ranks, sweep
from headstart.launch import quoted

CONF = jobs.CONF


@dataclass(frozen=True)
class Command:
    """A command: the module with its `run`, the class of its config, and a line of help."""

    module: str
    schema: str
    help: str


COMMANDS = {
    "prepare": Command("headstart.data.prepare", "PrepareRun", "conversations -> token rows"),
    "generate": Command(
        "headstart.data.generate", "GenerateRun", "prompts -> the target's own answers as rows"
    ),
    "capture": Command("headstart.data.capture", "CaptureRun", "rows -> features on disk"),
    "verify": Command(
        "headstart.data.verify_store",
        "VerifyRun",
        "features on disk -> whole and the target's own?",
    ),
    "train": Command("headstart.train.run", "TrainRun", "rows -> a head checkpoint"),
    "eval": Command("headstart.eval.run", "EvalRun", "heads + prompts -> figures and a report"),
    "tree": Command("headstart.eval.tree_run", "TreeRun", "a head + prompts -> its fastest tree"),
    "report": Command("headstart.eval.report_run", "ReportRun", "results -> one leaderboard"),
    "plan": Command(
        "headstart.eval.plan", "PlanRun", "a model and a device -> what drafting would buy"
    ),
    "pipeline": Command(
        "headstart.pipeline", "PipelineRun", "all of it from one config: experiment=demo"
    ),
}


def register() -> None:
    """Add every schema to Hydra's store; entry points and tests call it once."""
    from headstart.data.source import DataConfig
    from headstart.eval.engine.drafters.config import KINDS
    from headstart.eval.engine.policy_config import PolicyConfig
    from headstart.eval.engine.sampling import SamplingConfig
    from headstart.eval.hardware import HardwareConfig
    from headstart.eval.plan_model import ModelConfig
    from headstart.eval.settings import TreeConfig
    from headstart.heads.base import families
    from headstart.heads.load import TargetConfig
    from headstart.heads.runtime import RuntimeConfig
    from headstart.train.config import ParallelConfig, TrainConfig
    from headstart.train.tracking import LoggingConfig

    store = ConfigStore.instance()
    for family, (node, _) in families().items():
        store.store(group="head", name=f"base_{family}", node=node)
    groups = {
        "target": TargetConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "parallel": ParallelConfig,
        "logging": LoggingConfig,
        "tree": TreeConfig,
        "policy": PolicyConfig,
        "sampling": SamplingConfig,
        "runtime": RuntimeConfig,
        "model": ModelConfig,
        "hardware": HardwareConfig,
    }
    for group, node in groups.items():
        store.store(group=group, name=f"base_{group}", node=node)
    for kind, node in KINDS.items():
        store.store(group="drafter", name=f"base_{kind}", node=node)
    for name, command in COMMANDS.items():
        schema = getattr(importlib.import_module(command.module), command.schema)
        store.store(name=f"{name}_schema", node=schema)


def main() -> None:
    """Run the command named first on the command line."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        unknown = sys.argv[1:2] if sys.argv[1:2] not in ([], ["--help"], ["-h"]) else []
        print(usage(*unknown), file=sys.stderr if unknown else sys.stdout)
        raise SystemExit(2 if unknown or len(sys.argv) < 2 else 0)
    run_command(sys.argv.pop(1))


def usage(unknown: str | None = None) -> str:
    """Return the help page of the dispatcher."""
    lines = [f"headstart: no command {unknown!r}"] if unknown else []
    lines += ["usage: headstart COMMAND [option=value ...]", ""]
    lines += [f"  {name:<10}{command.help}" for name, command in COMMANDS.items()]
    lines += ["", "headstart COMMAND --help lists a command's options, --cfg job shows its config."]
    return "\n".join(lines)


def run_command(name: str) -> None:
    """Compose and check the config, then hand over to Hydra; of several ranks, on each of them."""
    register()
    logging.captureWarnings(True)
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    swept: list[str] = []

    def job(cfg: DictConfig) -> Any:
        swept[:] = [HydraConfig.get().sweep.dir]
        return jobs.run_job(name, module.run, cfg, to_object)

    with _prepared(name, getattr(module, command.schema)) as directory:
        hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name=name)(job)()
        places = [directory] if directory else swept  # a launcher may have run them elsewhere
        if jobs.swept(sys.argv) and places:
            failed = sweep.end_sweep(Path(places[0]))
            if failed:
                raise SystemExit(f"headstart {name}: {failed}")


@contextmanager
def _prepared(name: str, schema: type) -> Iterator[str | None]:
    """Refuse what cannot run before Hydra makes a directory, and hold that directory meanwhile.

    Yields the directory of a sweep, if this is one and options alone decide on it.
    """
    directory = None
    overrides = sys.argv[1:]
    flags = {override for override in overrides if override.startswith("-")}
    with ExitStack() as held:
        with _one_sentence(name):
            jobs.refuse_in_ranks(name, schema, overrides)
            if ranks.place()[0] > 0:
                sys.argv[1:] = ranks.quiet_arguments(overrides)
            elif not flags:
                _prepare_run(name, schema, overrides, held)
            elif flags <= jobs.SWEEP_FLAGS:
                fixed = [o for o in overrides if o not in flags]
                sys.argv[1:] = ["-m", *fixed]  # Hydra takes flags before overrides only
                directory = _prepare_sweep(name, fixed, held)
        yield directory


def _prepare_run(name: str, schema: type, overrides: list[str], held: ExitStack) -> None:
    """Check one run's options; the directory is resolved here, once: it may hold a time stamp."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _refuse_sweep(name, overrides)
        config = load_config(name, [o for o in overrides if _counts(o)])
    if jobs.shards(schema):
        jobs.check_launch(config)
        if config.launch.node() > 0:
            sys.argv[1:] = ranks.quiet_arguments(overrides)
            return
    _refuse_unwritable(config.out)
    if name == "train" and not ranks.started_by_us():  # others take up what they find
        held.enter_context(sweep.claim(Path(config.out)))
    sys.argv.append(f"out={quoted(config.out)}")


def _prepare_sweep(name: str, overrides: list[str], held: ExitStack) -> str | None:
    _refuse_bad_values(name, overrides)
    directory = jobs.sweep_directory(name, overrides)
    if directory is not None:
        _refuse_unwritable(directory)
        held.enter_context(sweep.claim(Path(directory)))
        sys.argv.append(f"hydra.sweep.dir={quoted(directory)}")
    return directory


def _refuse_bad_values(name: str, overrides: list[str]) -> None:
    """Raise for a value swept over that no job could take, before any job starts.

    Each of a list is tried beside the first of the other lists.
    """
    parsed = OverridesParser.create().parse_overrides([o for o in overrides if _counts(o)])
    lists = [o for o in parsed if o.is_choice_sweep()]
    if len(lists) < sum(o.is_sweep_override() for o in parsed):
        return  # others depend on the sweeper
    fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
    values = [[f"{o.get_key_element()}={v}" for v in o.sweep_string_iterator()] for o in lists]
    for place, tried in enumerate(values):
        others = [of_list[0] for i, of_list in enumerate(values) if i != place]
        for value in tried:
            load_config(name, [*fixed, *others, value])


def load_config(name: str, overrides: list[str]) -> Any:
    """Return the validated config object of a command under these overrides."""
    GlobalHydra.instance().clear()
    with initialize_config_module(CONF, version_base="1.3"):
        cfg = compose(name, overrides=overrides)
    return to_object(cfg)


def to_object(cfg: DictConfig) -> Any:
    """Turn a composed config into its dataclass, naming every option still to be given."""
    _refuse_added_keys(cfg)
    # Not OmegaConf.missing_keys: it fails on an interpolation of what is missing.
    missing = sorted(_missing(OmegaConf.to_container(cfg, resolve=False)))
    if missing:
        raise ValueError(
            f"{missing[0]} is not set: give {' '.join(f'{key}=...' for key in missing)}"
        )
    return OmegaConf.to_object(cfg)


def _missing(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if value == MISSING:
            yield f"{path}{key}"
        elif isinstance(value, dict):
            yield from _missing(value, f"{path}{key}.")


def _refuse_added_keys(cfg: DictConfig, path: str = "") -> None:
    """Refuse keys that `+key=value` added to a config that has no such field."""
    kind = OmegaConf.get_type(cfg)
    known = {f.name for f in fields(kind)} if is_dataclass(kind) else None
    for key in cfg:
        if known is not None and key not in known:
            raise ValueError(_no_such_option(f"{path}{key}", sorted(known)))
        # An interpolation is no field of its own, and may point at what is still to be given.
        given = not (OmegaConf.is_interpolation(cfg, key) or OmegaConf.is_missing(cfg, key))
        node = cfg[key] if given else None
        if isinstance(node, DictConfig):
            _refuse_added_keys(node, f"{path}{key}.")


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """End the process with one sentence for an error in the options."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise SystemExit(f"headstart {name}: {explain(error)}") from None
    finally:
        GlobalHydra.instance().clear()


def _counts(override: str) -> bool:
    """Tell the options of a command from Hydra's own, of which a search path decides on them."""
    return not override.startswith("hydra.") or override.startswith("hydra.searchpath=")


def _refuse_sweep(name: str, overrides: list[str]) -> None:
    """Raise ValueError for an experiment that names what to sweep over, run as one job."""
    with initialize_config_module(CONF, version_base="1.3"):
        hydra_cfg = compose(name, overrides=overrides, return_hydra_config=True).hydra
    if hydra_cfg.sweeper.params:
        swept = ", ".join(hydra_cfg.sweeper.params)
        raise ValueError(
            f"experiment={hydra_cfg.runtime.choices.experiment}: is a sweep over {swept}; run "
            f"headstart {name} -m with it"
        )


def _refuse_unwritable(out: str) -> None:
    """Raise ValueError for a directory that cannot be made; Hydra would fail with a traceback."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out={out}: cannot be made ({error.strerror}); choose another directory"
        ) from None
    if not os.access(out, os.W_OK):
        raise ValueError(f"out={out}: cannot be written to; choose another directory")


def explain(error: BaseException) -> str:
    """Return one sentence for a configuration error: the key, and what is allowed there."""
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        # Of an option in a list, [lokup], Hydra does not say what there is.
        files = (Path(__file__).parent / "conf" / group).glob("*.yaml")
        found = error.options or [file.stem for file in files]
        known = sorted(o for o in found if not o.startswith("base_"))
        return _no_such_option(f"{group}={option}", known)
    cause = error.__cause__ or error
    if group := re.match(r"Could not override '(.+?)'\. No match", str(error)):
        return f"{group[1]}: this command has no such option; its --help shows those it has"
    where = re.match(r"In 'experiment/(.+?)': ConfigKeyError.*?Key '(\w+)'", str(error), re.S)
    if where:
        name, key = where.groups()
        return f"experiment={name}: made for another command: it sets {key}, unknown to this one"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    kind = getattr(cause, "object_type", None)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and is_dataclass(kind):
        return _no_such_option(cause.full_key, sorted(f.name for f in fields(kind)))
    told = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *rest = told or [type(error).__name__]
    if first.endswith(":"):  # Hydra's heading; what went wrong is on the line below
        return " ".join((first, *rest[:1]))
    return first if lines and lines[0] in first else f"{first}: {lines[0]}"


def _no_such_option(given: str, known: list[str]) -> str:
    close = difflib.get_close_matches(re.split(r"[.=]", given)[-1], known, n=1)
    near = f" (did you mean {close[0]}?)" if close else ""
    return f"{given}: no such option{near}; expected one of {', '.join(known)}"
