"""Checks of the vocabulary, its special tokens, and the chat templates."""

from __future__ import annotations

import re

from ringlm.doctor.facts import ANSWER, CONVERT, NEW, SET, Facts, Finding, Findings
from ringlm.errors import Error, TemplateError
from ringlm.vocab import TokenType

__all__ = [
    "check_arrays",
    "check_bos",
    "check_end_of_turn",
    "check_markers",
    "check_pre_tokenizer",
    "check_special_ids",
    "check_special_texts",
    "check_templates",
]

_ID = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
#: Texts that say what a token is for.
_BEGINS = re.compile(r"<s>|\[?<?bos>?\]?|<[|｜].*(start|begin).*[|｜]>|<start_of_turn>", re.IGNORECASE)  # noqa: RUF001
_ENDS = re.compile(r"</s>|<eos>|<[|｜](im_end|eot_id|end|eom_id)[|｜]>|<end_of_turn>", re.IGNORECASE)  # noqa: RUF001
_BOS = re.compile(r"<s>|\[?<?bos>?\]?|<[|｜](begin|start)[_▁]?of[_▁]?(text|sentence)[|｜]>", re.IGNORECASE)  # noqa: RUF001
_EMPTY = re.compile(r"\[?<?(pad|unk)>?\]?", re.IGNORECASE)
#: What may be a token of its own.
_TOKEN = re.compile(r"<[^<>\s]{2,}>|\[/?[A-Z_]{3,}\]")
#: What templates use as markers, also if it is not in the vocabulary.
_MARKER = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>|</?s>|\[/?[A-Z_]{3,}\]")  # noqa: RUF001


def check_arrays(f: Facts) -> Findings:
    """Lengths and presence of the vocabulary's arrays."""
    n = len(f.tokens)
    for name in ("token_type", "scores"):
        value = f.file.get(f"tokenizer.ggml.{name}")
        if n and value is not None and hasattr(value, "__len__") and len(value) != n:
            yield Finding(
                "error",
                f"tokenizer.ggml.{name}",
                f"{len(value)} entries for {n} tokens",
                "which entry belongs to which token is not certain",
                CONVERT,
            )
    if (
        f.text("tokenizer.ggml.model") in ("gpt2", "gemma4")
        and n > 1000
        and not f.file.get("tokenizer.ggml.merges")
    ):
        yield Finding(
            "error",
            "tokenizer.ggml.merges",
            "missing or empty",
            "text falls into single bytes, which the model was not taught",
            CONVERT,
        )


def check_pre_tokenizer(f: Facts) -> Findings:
    pre = f.text("tokenizer.ggml.pre")
    if f.text("tokenizer.ggml.model") != "gpt2" or pre not in (None, "default") or f.arch == "gpt2":
        return
    name = "llama-bpe" if f.is_llama_3 else "qwen2" if f.arch.startswith("qwen") else "NAME"
    yield Finding(
        "error",
        "tokenizer.ggml.pre",
        "missing" if pre is None else f"{pre!r}, which is none",
        "the rule that cuts text into words is guessed: numbers and punctuation may get other tokens than in "
        "training, and the answers are worse without any error",
        NEW.format(options=f"--pre-tokenizer {name}"),
    )


# ---- special tokens ----------------------------------------------------------------------------------------


def check_special_ids(f: Facts) -> Findings:
    n = len(f.tokens)
    for key in f.keys:
        name, value = _ID.fullmatch(key), f.number(key)
        if name and n and value is not None and not 0 <= value < n:
            yield Finding(
                "error",
                key,
                f"{value}, but the vocabulary has {n} tokens",
                {
                    "eos": "nothing ends an answer",
                    "eot": "nothing ends an answer",
                    "bos": "no text can be begun as the model was taught",
                }.get(name[1], "whoever uses it reads beyond the vocabulary"),
                NEW.format(options=f"--special-token {name[1]} TEXT"),
            )
    if f.tokens and f.number("tokenizer.ggml.eos_token_id") is None and not (f.vocab and f.vocab.eog_ids):
        yield Finding(
            "error",
            "tokenizer.ggml.eos_token_id",
            "missing, and no token has the name of a known end",
            "an answer ends only where the context does",
            NEW.format(options="--special-token eos TEXT"),
        )


def check_special_texts(f: Facts) -> Findings:
    """Whether special tokens are special, and are what their names say."""
    if f.vocab is None:
        return
    for name in ("eos", "eot", "bos"):
        token = f.vocab.special.get(name)
        key = f"tokenizer.ggml.{name}_token_id"
        if token is None or f.file.get(key) is None:
            continue
        text = f.vocab.tokens[token]
        if f.vocab.types[token] in (TokenType.NORMAL, TokenType.BYTE, TokenType.UNUSED):
            consequence = (
                "what is to begin with BOS begins with that word"
                if name == "bos"
                else "answers end where that word comes, and not where they are over"
            )
            what = f"{token}, which is the ordinary token {text!r}"
        elif name != "bos" and (_BEGINS.fullmatch(text) or _EMPTY.fullmatch(text)):
            what = f"{token}, which is {text!r}"
            consequence = "answers do not end: that is a token for something else"
        elif name == "bos" and _ENDS.fullmatch(text) and f.vocab.add_bos:
            what = f"{token}, which is {text!r}, and add_bos_token is true"
            consequence = "every text begins with a token that ends one"
        else:
            continue
        yield Finding("error", key, what, consequence, NEW.format(options=f"--special-token {name} TEXT"))


def check_bos(f: Facts) -> Findings:
    key = "tokenizer.ggml.add_bos_token"
    bos, said = f.number("tokenizer.ggml.bos_token_id"), f.flag(key)
    if f.vocab is None:
        return
    if said and bos is None:
        yield Finding(
            "error",
            key,
            "true, but tokenizer.ggml.bos_token_id is missing",
            "text cannot be encoded as the file asks for",
            NEW.format(options="--special-token bos TEXT"),
        )
    if said is False and f.arch.startswith("gemma"):
        yield Finding(
            "error",
            key,
            f"false, and the architecture is {f.arch}",
            "these models answer nonsense to a text that does not begin with BOS",
            SET.format(key=key, value="true"),
        )
    if said is None and bos is not None:
        how = "puts BOS before a text" if _adds_bos(f) else "puts no BOS before a text"
        yield Finding(
            "note",
            key,
            "missing",
            f"each program decides by itself; ringlm {how}",
            "nothing, if the answers are good",
        )
    written = _first_written(f)
    if bos is None or written is None or not _adds_bos(f):
        return
    if written == f.vocab.tokens[int(bos)]:
        yield Finding(
            "note",
            key,
            "BOS is to be added, and the chat template writes it too",
            "ringlm has it once; a program that does not look has it twice, and the answers are worse",
            "nothing here",
        )
    elif _BOS.fullmatch(written):
        yield Finding(
            "error",
            "tokenizer.chat_template",
            f"it begins with {written!r}, but BOS, which is added, is {f.vocab.tokens[int(bos)]!r}",
            "conversations begin with two different beginnings",
            NEW.format(options=f"--special-token bos '{written}'"),
        )


def _adds_bos(f: Facts) -> bool:
    return not isinstance(f.tokenizer, Error) and f.tokenizer.add_bos


# ---- templates ---------------------------------------------------------------------------------------------


def check_templates(f: Facts) -> Findings:
    from ringlm.template import ChatTemplate, named_templates

    templates = named_templates(f.file)
    if not templates and f.tokens:
        yield Finding(
            "note",
            "tokenizer.chat_template",
            "missing",
            "a chat takes the format that the vocabulary suggests; base models have none, and may never stop",
            "if it is a chat model, " + NEW.format(options="--chat-template-file TEMPLATE"),
        )
    for name, source in templates.items():
        try:
            ChatTemplate(source, name=name)
        except TemplateError as error:
            key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
            yield Finding(
                "error",
                key,
                str(error),
                "no conversation can be rendered",
                NEW.format(options="--chat-template-file TEMPLATE"),
            )


def _first_written(f: Facts) -> str | None:
    """The marker that conversations begin with."""
    text = f.conversation
    found = None if text is None else _MARKER.match(text.lstrip())
    return None if found is None else found[0]


def check_markers(f: Facts) -> Findings:
    """Markers of the template that a person could type."""
    text = f.conversation
    if text is None or f.vocab is None:
        return
    ids = f.vocab.ids_by_text()
    plain = sorted(
        {m for m in _MARKER.findall(text) if m in ids and f.vocab.types[ids[m]] != TokenType.CONTROL}
    )
    if plain:
        yield Finding(
            "note",
            "tokenizer.ggml.token_type",
            f"the template's {', '.join(map(repr, plain))} is no control token in the vocabulary",
            "who types it in a message changes who says what",
            CONVERT,
        )


def check_end_of_turn(f: Facts) -> Findings:
    """What the template writes behind an answer, up to the end of the line, has to end the generation."""
    text = f.conversation
    if text is None or f.vocab is None or ANSWER not in text:
        return
    behind = text[text.rindex(ANSWER) + len(ANSWER) :].lstrip().partition("\n")[0]
    ids = f.vocab.ids_by_text()
    known = [ids[text] for text in _TOKEN.findall(behind) if text in ids]
    lost = _MARKER.match(behind)
    if any(token in f.vocab.eog_ids for token in known) or not (known or lost):
        return
    if known:
        end = f.vocab.tokens[known[-1]]
        kind = TokenType(f.vocab.types[known[-1]]).name.lower().replace("_", "-")
        what = f"it ends an answer with {end!r} (token {known[-1]}, {kind}), which ends no generation"
        remedy = NEW.format(options=f"--special-token eot '{end}'")
    else:
        assert lost is not None
        what = f"it ends an answer with {lost[0]!r}, which the vocabulary does not have"
        remedy = "take the template of the model that this vocabulary belongs to"
    yield Finding(
        "error",
        "tokenizer.chat_template",
        what,
        "answers do not stop: the model goes on with the next turns by itself",
        remedy,
    )
