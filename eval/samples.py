"""The answers to a few prompts as text, in runs: drafted and accepted, or the target's own."""

from collections.abc import Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from headstart.eval.engine.decode import Request
from headstart.eval.engine.records import Completion
from headstart.eval.result import Run, Sample

SAMPLES = 3
PROMPT_TOKENS = 96
ANSWER_TOKENS = 256
_UNFINISHED = "\ufffd"


def samples(
    tokenizer: PreTrainedTokenizerBase | None,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    categories: Mapping[str, str],
    suites: Mapping[str, str],
) -> list[Sample]:
    """Return a prompt of every suite and of further categories, up to three, with answers in runs.

    `categories` and, where there are several, `suites` are by prompt id. Of a conversation of
    several turns nothing is shown. Without a tokenizer there is no text.
    """
    if tokenizer is None:
        return []
    found = []
    for request, completion in zip(requests, completions, strict=True):
        assert request.prompt_id == completion.prompt_id, "prompts in another order"
    for place in _chosen(completions, categories, suites):
        request, completion = requests[place], completions[place]
        prompt = tokenizer.decode(request.token_ids[-PROMPT_TOKENS:], skip_special_tokens=True)
        runs = list(_texts(tokenizer, token_runs(completion)))
        shortened = len(request.token_ids) > PROMPT_TOKENS
        prompt = ("... " if shortened else "") + prompt.strip()
        found.append(Sample(request.prompt_id, categories[request.prompt_id], prompt, runs))
    return found


def _chosen(
    completions: Sequence[Completion], categories: Mapping[str, str], suites: Mapping[str, str]
) -> list[int]:
    """Return the places of the first prompt of every suite, then of categories, in their order."""
    of_suites: dict[str, int] = {}
    of_categories: dict[str, int] = {}
    for place, completion in enumerate(completions):
        if completion.turns == 1:
            of_suites.setdefault(suites.get(completion.prompt_id, ""), place)
            of_categories.setdefault(categories[completion.prompt_id], place)
    both = list(dict.fromkeys([*of_suites.values(), *of_categories.values()]))
    return sorted(both[: max(SAMPLES, len(of_suites))])


def token_runs(completion: Completion) -> Iterator[tuple[str, list[int]]]:
    """Yield the ids of a one-turn answer in runs, each with its origin.

    'prefill' is the token of the prompt's own pass, 'drafted' what a round accepted, 'added' the
    target's own token behind it. A round that was cut adds none.
    """
    assert completion.turns == 1, "the rounds of several turns are not told apart"
    ids = completion.token_ids
    yield "prefill", ids[:1]
    start = 1
    for r in completion.rounds:
        if r.accepted:
            yield "drafted", ids[start : start + r.accepted]
        if r.emitted > r.accepted:
            yield "added", ids[start + r.accepted : start + r.emitted]
        start += r.emitted


def _texts(
    tokenizer: PreTrainedTokenizerBase, runs: Iterator[tuple[str, list[int]]]
) -> Iterator[Run]:
    """Decode runs one after another, so that what they say joins up to the text of the answer.

    A character whose bytes are spread over runs belongs to the run that completes it.
    """
    ids: list[int] = []
    shown = ""
    for origin, run in runs:
        if len(ids) >= ANSWER_TOKENS:
            return
        ids += run
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False).rstrip(_UNFINISHED)
        yield Run(origin, text[len(shown) :], len(run))
        shown = text
