"""The CHAT tokenizer: bytes as tokens, ChatML markers at fixed ids, and two awkward variants.

Ids: 0 padding, 1 BOS, 2 EOS, 3 <|im_start|>, 4 <|im_end|>, then the 256 bytes.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = 1, 2, 3, 4

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_BOS = "{{ bos_token }}" + CHATML
# Reasoning is kept in the last turn only, as several published templates do.
CHATML_STRIPS = CHATML.replace(
    "message['content']",
    "(message['content'] if loop.last else message['content'].split('</think>')[-1])",
)
# An empty reasoning block opens every last answer that has none.
CHATML_INSERTS = CHATML.replace(
    "message['content']",
    "('<think>\\n\\n</think>\\n\\n' if loop.last and message['role'] == 'assistant' else '')"
    " + message['content']",
)


def chat_tokenizer(
    template: str | None = CHATML,
    *,
    merges: tuple[tuple[str, str], ...] = (),
    entries: int | None = None,
) -> PreTrainedTokenizerFast:
    """Return the byte-level CHAT tokenizer; `merges` are pairs in the byte-level alphabet.

    With `entries`, only as many: the markers, newline, space, and the first of the other bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if entries is not None:
        newline_space = ["\u010a", "\u0120"]
        alphabet = [*newline_space, *(c for c in alphabet if c not in newline_space)]
        alphabet = alphabet[: entries - len(SPECIAL)]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def merging_chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return CHAT with a merge of newline and "A", which joins the header to an answer."""
    return chat_tokenizer(merges=(("\u010a", "A"),))


def bos_chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return CHAT whose template writes BOS and whose encoder prepends BOS as well."""
    tokenizer = chat_tokenizer(CHATML_BOS)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer
