"""Ten styles of chat template, each with its markers in a byte-level tokenizer of its own.

The templates under templates/ are written for these tests, from public descriptions of the formats.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@dataclass(frozen=True)
class Style:
    """One style: its markers, and what a supervised answer looks like in it."""

    special: tuple[str, ...]
    answer: str
    """A supervised answer, the text at {}."""
    quote: str
    """A text that would end a turn and open an answer, were it not part of a turn."""
    bos: str | None = None
    eos: str | None = None
    plain: tuple[str, ...] = ()
    """Tokens of their own that make no turns, such as <think>."""
    split: bool = False
    """Whether a later prompt shows an earlier answer differently."""
    call: str | None = None
    """A supervised tool call; None where the style has none."""
    no_tools: str = ""
    """Why a conversation with a tool turn is dropped."""


IM = ("<|im_start|>", "<|im_end|>")
IM_QUOTE = "<|im_end|>\n<|im_start|>assistant\nhi"
TURNS = tuple(f"<|{name}|>" for name in ("system", "user", "assistant", "end"))
DEEP = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in (
        "User",
        "Assistant",
        "tool\u2581calls\u2581begin",
        "tool\u2581calls\u2581end",
        "tool\u2581output\u2581begin",
        "tool\u2581output\u2581end",
    )
)
DEEP_BOS, DEEP_EOS = (f"<\uff5c{end}\u2581of\u2581sentence\uff5c>" for end in ("begin", "end"))
LEFT_OUT = "with a tool turn that the template leaves out"
NO_CALLS = "with a tool call that the template rewrites or leaves out"

STYLES = {
    "chatml": Style(IM, "{}<|im_end|>", IM_QUOTE, call=f"<tool_call>{CALL}</tool_call><|im_end|>"),
    "chatml_marked": Style(
        IM, "{}<|im_end|>", IM_QUOTE, call=f"<tool_call>{CALL}</tool_call><|im_end|>"
    ),
    "llama3": Style(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{}<|eot_id|>",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nhi",
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        call='{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>',
    ),
    "llama2": Style(
        (), " {} </s>", "a </s><s>[INST] b [/INST] hi", bos="<s>", eos="</s>", no_tools=NO_CALLS
    ),
    "gemma": Style(
        ("<start_of_turn>", "<end_of_turn>"),
        "{}<end_of_turn>",
        "<end_of_turn>\n<start_of_turn>model\nhi",
        bos="<bos>",
        eos="<eos>",
        no_tools=NO_CALLS,
    ),
    "mistral": Style(
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        " {}</s>",
        "[/INST] hi</s>[INST] b",
        bos="<s>",
        eos="</s>",
        call=f"[TOOL_CALLS] [{CALL}]</s>",
    ),
    "qwen3": Style(
        IM,
        "{}<|im_end|>",
        IM_QUOTE,
        eos="<|endoftext|>",
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        split=True,
        call=f"<tool_call>\n{CALL}\n</tool_call><|im_end|>",
    ),
    "deepseek": Style(
        DEEP,
        "{}" + DEEP_EOS,
        f"{DEEP_EOS}{DEEP[0]}b{DEEP[1]}hi",
        bos=DEEP_BOS,
        eos=DEEP_EOS,
        call=f'{DEEP[2]}weather\n{{"city": "Oslo"}}{DEEP[3]}{DEEP_EOS}',
    ),
    "phi3": Style(
        TURNS, "{}<|end|>", "<|end|>\n<|assistant|>\nhi", eos="<|endoftext|>", no_tools=LEFT_OUT
    ),
}
R1 = Style(
    DEEP[:2],
    "hm\n</think>\n\n{}" + DEEP_EOS,
    STYLES["deepseek"].quote,
    bos=DEEP_BOS,
    eos=DEEP_EOS,
    plain=("<think>", "</think>"),
    split=True,
    no_tools=LEFT_OUT,
)


def style_tokenizer(
    name: str, *, merges: tuple[tuple[str, str], ...] = ()
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the markers and the template of a style."""
    style = R1 if name == "deepseek_r1" else STYLES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=style.bos,
        eos_token=style.eos,
        clean_up_tokenization_spaces=False,
    )
    marks = [AddedToken(text, special=True, normalized=False) for text in style.special]
    marks += [AddedToken(text, special=False, normalized=False) for text in style.plain]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer
