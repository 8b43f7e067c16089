"""Whether a server serves this target: its model's name, its chat template, its greedy answers.

Each check compares with what the target itself would do, and its error says what was found, what
the target has, and how to make them agree. Shapes: T tokens of a prompt and its answer, V target
vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from headstart.data.answering import Answer, Ask
from headstart.data.http_json import HttpClient, HttpRefusal
from headstart.data.template import ChatTemplate
from headstart.heads.target import Target

log = logging.getLogger(__name__)
PROBES = ("What is the capital of France?", "Count from one to ten.", "Write a line about rain.")
PROBE_TOKENS = 8
MARGIN = 0.5
"""Nats by which a server's greedy token may fall short of the target's best: rounding in half
precision moves logits by a tenth or two, another model's tokens miss by whole nats."""
NO_SUCH_CALL = (400, 404, 405, 422, 501)


def probes(template: ChatTemplate) -> list[Ask]:
    """Return a few short greedy asks."""
    prompts = [template.prompt_ids([{"role": "user", "content": text}]) for text in PROBES]
    return [
        Ask(f"probe {number}", tuple(ids), PROBE_TOKENS) for number, ids in enumerate(prompts, 1)
    ]


def check_answers(
    url: str, model: str, target: Target, answers: Sequence[tuple[Ask, Answer]]
) -> None:
    """Refuse a server whose greedy answers the target would not give, or that cannot be told."""
    for probe, answer in answers:
        if answer.unusable:
            log.warning("%s: %s is not compared: %s", url, probe.prompt_id, answer.unusable)
        else:
            _check_answer(url, model, target, probe, answer)
    if all(answer.unusable for _, answer in answers):
        raise ValueError(
            f"{url}: no answer of model {model} could be compared with the target's, the last "
            f"{answers[-1][1].unusable}; serve it so that it returns token ids, or usable text"
        )


def _check_answer(url: str, model: str, target: Target, probe: Ask, answer: Answer) -> None:
    short, best = shortfall(target, probe.token_ids, answer.token_ids)
    if short > MARGIN:
        asked, said, ours = (
            target.tokenizer.decode(ids, skip_special_tokens=False)
            for ids in (probe.token_ids, answer.token_ids, best)
        )
        raise ValueError(
            f"{url}: model {model} is not the target {target.name}: after {asked!r} it says "
            f"{said!r}, the target {ours!r} (a token {short:.1f} nats below the best); serve the "
            "target, or set target.path to what is served"
        )


@torch.no_grad()
def shortfall(
    target: Target, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[float, list[int]]:
    """Return by how many nats an answer's worst token falls short of the target's best there.

    Beside it the target's best token at every place. Zero for the target's own greedy answer,
    rounding apart.
    """
    tokens_1T = torch.tensor([[*prompt, *answer]], device=target.device)
    hidden_TD = target.forward(tokens_1T).hidden_BTD[0, len(prompt) - 1 : -1]
    logits_TV = target.readout(hidden_TD).float()
    best = logits_TV.max(-1)
    chosen_T = logits_TV.gather(-1, tokens_1T[0, len(prompt) :, None])[:, 0]
    return (best.values - chosen_T).max().item(), best.indices.tolist()


def served_models(client: HttpClient) -> dict[str, dict[str, Any]]:
    """Return what the server says of each model it serves, by name."""
    reply = client.get("/v1/models")
    models = reply.get("data") if isinstance(reply, dict) else None
    if not models:
        raise ValueError(f"{client.url}/v1/models: lists no model; is one loaded?")
    return {model["id"]: model for model in models}


def name_of_target(
    url: str, served: dict[str, dict[str, Any]], target: str, asked: str | None
) -> str:
    """Return the server's name for the target."""
    if asked is not None:
        if asked not in served:
            raise ValueError(
                f"generate.server.model={asked}: {url} serves {', '.join(sorted(served))}"
            )
        return asked
    own = {target.rstrip("/"), target.rstrip("/").rpartition("/")[2]}
    found = [name for name, model in served.items() if own & {name, model.get("root")}]
    if len(found) != 1:
        raise ValueError(
            f"{url} serves {', '.join(sorted(served))}; the target is {target}; if one of these is "
            "the target under another name, set generate.server.model to it"
        )
    return found[0]


def check_template(client: HttpClient, model: str, template: ChatTemplate) -> None:
    """Refuse a server that renders or tokenises a chat differently, where it can be asked.

    Prompts go out as ids, so the server's own template never touches them; but it is what the
    head's users will be served with. A template that writes today's date is not compared: ours
    writes one day, and the server may be in another time zone; the tokenizer still is.
    """
    chat = [{"role": "user", "content": PROBES[0]}]
    ours = template.prompt_ids(chat)
    tokenizer = template.tokenizer
    text = tokenizer.decode(ours, skip_special_tokens=False)
    asked = {"model": model}
    checks = [
        (asked | {"messages": chat, "add_generation_prompt": True}, ours),
        (
            asked | {"prompt": text, "add_special_tokens": False},
            tokenizer.encode(text, add_special_tokens=False),
        ),
    ]
    if template.has_clock:
        log.info("%s: its chat template writes today's date and is not compared", client.url)
        del checks[0]
    for body, want in checks:
        try:
            reply = client.post("/tokenize", body)
        except HttpRefusal as refusal:
            if refusal.status not in NO_SUCH_CALL:
                raise
            continue
        have = reply.get("tokens") if isinstance(reply, dict) else None
        if have == want:
            if "messages" not in body:
                log.info("%s: renders no chat on request; its template is not compared", client.url)
            return
        raise ValueError(_differs(client.url, tokenizer, have, want))
    log.info("%s: does not tokenise on request; its chat template is not compared", client.url)


def _differs(
    url: str, tokenizer: PreTrainedTokenizerBase, have: list[int] | None, want: list[int]
) -> str:
    def shown(ids: list[int] | None) -> str:
        return "nothing" if ids is None else repr(tokenizer.decode(ids, skip_special_tokens=False))

    return (
        f"{url}: renders a chat as {shown(have)}, the target as {shown(want)} ({len(have or [])} "
        f"and {len(want)} tokens); serve the target with its own tokenizer and chat template"
    )


def check_prompt(url: str, choice: dict[str, Any], ask: Ask) -> None:
    """Refuse a server that says it read other ids than it was sent."""
    read = choice.get("prompt_token_ids")
    if read is not None and list(read) != list(ask.token_ids):
        raise ValueError(
            f"{url}: prompt {ask.prompt_id} was sent as {len(ask.token_ids)} tokens, the server "
            f"read {len(read)} others; it must not change prompts that are given as ids"
        )
