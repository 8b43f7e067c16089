"""`headstart plan`: a model's configuration and a device -> what drafting would buy, and cost."""

import logging
from pathlib import Path

from headstart.eval.plan_make import make_plan
from headstart.eval.plan_report import print_plan, write_plan
from headstart.eval.plan_settings import PlanRun as PlanRun

log = logging.getLogger(__name__)


def run(config: PlanRun) -> None:
    """Plan, print and write (the command's entry)."""
    plan = make_plan(config)
    print_plan(plan)
    for path in write_plan(plan, Path(config.out)):
        log.info("plan: %s", path)
