"""What a command does with one composed config: work here, start ranks, or be a job of a sweep."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError

from headstart import ranks, sweep
from headstart.launch import quoted, start_ranks, starts_ranks
from headstart.launch_config import LaunchConfig, check, count_gpus
from headstart.signals import Stopped, terminable

CONF = "headstart.conf"
SWEEP_FLAGS = {"-m", "--multirun"}

Work = Callable[[Any], Any]
ToObject = Callable[[DictConfig], Any]


def swept(arguments: Sequence[str]) -> bool:
    """Tell whether these arguments ask for a sweep."""
    return not SWEEP_FLAGS.isdisjoint(arguments)


def shards(schema: type) -> bool:
    """Tell whether a command spreads its work over ranks: whether it has launch options."""
    return "launch" in {field.name for field in fields(schema)}


def refuse_in_ranks(name: str, schema: type, arguments: Sequence[str]) -> None:
    """Raise ValueError for what the ranks of a launcher would each do by themselves."""
    if not ranks.in_rank():
        return
    if swept(arguments):
        raise ValueError(
            "-m under torchrun or accelerate would sweep on every rank; start "
            f"headstart {name} -m without them, with launch.num_processes=N"
        )
    if ranks.place()[1] > 1 and not shards(schema):
        raise ValueError(
            f"{ranks.place()[1]} processes were started, this command runs in one; start it "
            "without a launcher"
        )


def sweep_directory(name: str, overrides: Sequence[str]) -> str | None:
    """Return the directory of a sweep, None where it depends on what is swept over.

    Raises ValueError for a sweep that each of several machines would make.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
    try:
        with initialize_config_module(CONF, version_base="1.3"):
            cfg = compose(name, overrides=fixed, return_hydra_config=True)
        nodes = cfg.launch.nodes if "launch" in cfg else 1
        if nodes > 1 and cfg.hydra.runtime.choices["hydra/launcher"] == "basic":
            raise ValueError(
                f"-m with launch.nodes={nodes} would sweep on every machine; use "
                "hydra/launcher=slurm, or one machine a job"
            )
        return str(cfg.hydra.sweep.dir)
    except (InterpolationResolutionError, InterpolationToMissingValueError):
        return None
    except MissingConfigException as error:
        if "submitit" not in str(error.missing_cfg_file):
            raise
        raise ValueError(
            "hydra/launcher: slurm and local need the extra: pip install headstart[slurm]"
        ) from None
    finally:
        GlobalHydra.instance().clear()


def run_job(name: str, work: Work, cfg: DictConfig, to_object: ToObject) -> Any:
    """Run one composed config, as a job of a sweep if it is one."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return explained(lambda: _here_or_in_ranks(name, work, to_object(cfg), sweeping=False))
    cfg.out = hydra.runtime.output_dir  # else the jobs would write over one another
    if "logging" in cfg and cfg.logging.group is None:
        cfg.logging.group = hydra.sweep.dir

    def own() -> Any:
        return _here_or_in_ranks(name, work, to_object(cfg), sweeping=True)

    def told() -> Any:
        if "launch" in cfg and OmegaConf.to_object(cfg.launch).node() > 0:
            return own()  # machine 0 keeps the account
        settings = OmegaConf.to_container(cfg, resolve=True)
        return sweep.run_job(Path(cfg.out), hydra.overrides.task, settings, own)

    return explained(told)


def _here_or_in_ranks(name: str, work: Work, config: Any, *, sweeping: bool) -> Any:
    launch: LaunchConfig | None = getattr(config, "launch", None)
    if launch is None:
        return _to_the_end(work, config)
    check_launch(config)
    with terminable():
        if starts_ranks(launch, _kind(config), sweeping=sweeping):
            group = config.logging.group if hasattr(config, "logging") else None
            more = [] if group is None else [f"logging.group={quoted(group)}"]
            return start_ranks(launch, name, config.out, more)
        if ranks.in_rank():
            ranks.end_with_parent()
            ranks.take_device()
            config.out = ranks.agree(config.out)
        return _to_the_end(work, config)


def _to_the_end(work: Work, config: Any) -> Any:
    """Work, and leave the process group that it may have made: loading a split target does, too."""
    done = work(config)
    ranks.leave_group()
    return done


def check_launch(config: Any) -> None:
    """Refuse a launch that does not fit the other options or the machine. Raises ValueError."""
    check(config.launch, _kind(config), count_gpus(config.target.device))


def _kind(config: Any) -> str | None:
    return config.parallel.kind if hasattr(config, "parallel") else None


def explained(run: Callable[[], Any]) -> Any:
    """Run, and end the process with one sentence and a status that tell how it ended."""
    try:
        return run()
    except Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if ranks.in_rank():
            ranks.fail(error)
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not isinstance(error, sweep.USER_ERRORS):
            raise
        logging.getLogger("headstart").debug("failed", exc_info=True)
        raise SystemExit(f"error: {error}") from None
