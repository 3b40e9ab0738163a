"""A finding of the doctor, and what a file says, as the checks ask for it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ringlm.errors import Error, TemplateError

if TYPE_CHECKING:
    import ringlm._core as core
    from ringlm.tokenizer import Tokenizer
    from ringlm.vocab import Vocab

__all__ = ["ANSWER", "CONVERT", "NEW", "SET", "Facts", "Finding", "Findings"]

#: Remedies. The commands come with the package gguf.
CONVERT = "convert the model again from its original (ringlm convert FOLDER OUT)"
SET = "correct it: gguf-set-metadata FILE {key} {value}"
NEW = "write a corrected copy: gguf-new-metadata {options} FILE NEW_FILE"

ANSWER = "xyzzy"  # no template writes that by itself


@dataclasses.dataclass(frozen=True)
class Finding:
    """``error`` is something wrong, ``note`` something worth knowing. ``where`` is a key, a tensor or the
    file; ``what`` was found there, ``consequence`` is what comes of it, ``remedy`` what to do."""

    severity: Literal["error", "note"]
    where: str
    what: str
    consequence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.what}; {self.consequence}. To do: {self.remedy}"


Findings = Iterator[Finding]


class Facts:
    """What the checks look at. Values of a wrong type are None: that is for whoever needs them to refuse."""

    def __init__(self, path: str, file: core.GGUF) -> None:
        self.path, self.file, self.keys = path, file, file.keys()
        self.arch = self.text("general.architecture") or ""
        self.tensors = {tensor.name: tensor for tensor in file.tensors()}

    def text(self, key: str) -> str | None:
        value = self.file.get(key)
        return value if isinstance(value, str) else None

    def flag(self, key: str) -> bool | None:
        value = self.file.get(key)
        return value if isinstance(value, bool) else None

    def number(self, key: str) -> Any:
        """An int or a finite float."""
        value = self.file.get(key)
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value if plain and math.isfinite(value) else None

    def key(self, name: str) -> str:
        """A key of the architecture."""
        return f"{self.arch}.{name}"

    def size(self, name: str) -> int | None:
        """A count of the architecture: a whole number that is the same for all layers."""
        value = self.number(self.key(name))
        return value if isinstance(value, int) else None

    @cached_property
    def head_dim(self) -> int | None:
        n_embd, n_head = self.size("embedding_length"), self.size("attention.head_count")
        whole = n_embd // n_head if n_embd and n_head and n_embd % n_head == 0 else None
        return self.size("attention.key_length") or whole

    @cached_property
    def tokens(self) -> list[str]:
        value = self.file.get("tokenizer.ggml.tokens")
        return value if isinstance(value, list) else []

    @cached_property
    def refusal(self) -> Error | None:
        """What ringlm says where it cannot run the model."""
        import ringlm._core as core

        try:
            core.Model(self.path, 1, "cpu", repack=False).close()
        except Error as error:
            return error
        return None

    @cached_property
    def vocab(self) -> Vocab | None:
        """None where it cannot be read."""
        from ringlm.vocab import load_vocab

        try:
            return load_vocab(self.file)
        except Error:
            return None

    @cached_property
    def tokenizer(self) -> Tokenizer | Error:
        """The vocabulary at work, or why it does not."""
        from ringlm.tokenizer import Tokenizer

        try:
            return Tokenizer(self.file)
        except Error as error:
            return error

    @cached_property
    def conversation(self) -> str | None:
        """One turn, with ANSWER, as the default template renders it; None where it does not."""
        from ringlm.template import ChatTemplate

        source = self.text("tokenizer.chat_template")
        if source is None or self.vocab is None:
            return None
        bos, eos = (self.vocab.special.get(name) for name in ("bos", "eos"))
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
        try:
            template = ChatTemplate(
                source,
                bos_token="" if bos is None else self.vocab.tokens[bos],
                eos_token="" if eos is None else self.vocab.tokens[eos],
            )
            return template.render_noted(messages, add_generation_prompt=False).text
        except TemplateError:
            return None

    @cached_property
    def names(self) -> str:
        """All that the model calls itself and what it was made from, in small letters."""
        keys = [k for k in self.keys if re.match(r"general\.(name|basename|finetune|base_model)", k)]
        return " ".join(text.lower() for key in keys if (text := self.text(key)))

    @cached_property
    def is_llama_3(self) -> bool:
        """A model of the Llama 3 family, by its vocabulary."""
        return self.arch == "llama" and len(self.tokens) >= 128_000 and "<|start_header_id|>" in self.tokens
