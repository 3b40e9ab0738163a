"""``from ringlm.llama_cpp import Llama`` in the place of ``from llama_cpp import Llama``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ringlm.errors import InvalidArgument
from ringlm.model import Model

__all__ = ["Llama"]

# Constructor arguments there that change nothing here: how fast, how much is printed, how the file is read.
_IGNORED = frozenset(
    {
        "n_batch",
        "n_ubatch",
        "n_threads_batch",
        "use_mmap",
        "use_mlock",
        "verbose",
        "flash_attn",
        "offload_kqv",
    }
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logits_all": (False,),
    "vocab_only": (False,),
    "embedding": (False,),
    "lora_path": (None,),
    "chat_format": (None,),
    "draft_model": (None,),
}


class Llama(Model):
    """A Model that is constructed and called as llama-cpp-python's class is.

    ``n_ctx`` 0 is the default of Session; ``seed`` is that of every completion that names none.
    ``n_gpu_layers`` 0 is the CPU, -1 or as many as there are the GPU; some of them are InvalidArgument, as is
    any argument that would ask for something that is not here. An unknown one is TypeError.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_ctx: int = 0,
        n_gpu_layers: int = 0,
        n_threads: int | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        for name, value in options.items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise InvalidArgument(f"Llama: {name}={value!r} is not supported; leave it out")
            if name not in _NEUTRAL and name not in _IGNORED:
                raise TypeError(f"Llama got an unknown argument: {name}")
        device = "cuda" if n_gpu_layers else "cpu"
        super().__init__(model_path, device=device, n_threads=n_threads or None, n_ctx=n_ctx or None)
        n_layer = self.config.n_layer
        if 0 < n_gpu_layers < n_layer:
            self.close()
            raise InvalidArgument(
                f"Llama: n_gpu_layers is {n_gpu_layers}, and the model has {n_layer} layers; ringlm computes "
                "them all on the CPU (0) or all on the GPU (-1)"
            )
        # 0xFFFFFFFF and -1 stand for a random seed there.
        self._seed = None if seed in (-1, 0xFFFFFFFF) else seed

    def create_completion(
        self, prompt: str | Sequence[int] = "", *, stream: bool = False, **options: Any
    ) -> Any:
        options.setdefault("seed", self._seed)
        return super().create_completion(prompt, stream=stream, **options)

    __call__ = create_completion

    def create_chat_completion(self, messages: Any, *, stream: bool = False, **options: Any) -> Any:
        options.setdefault("seed", self._seed)
        return super().create_chat_completion(messages, stream=stream, **options)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        ids = self.tokenizer.encode(text.decode("utf-8"), add_special=add_bos, parse_special=special)
        return list(ids)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of ``tokens``; control tokens have none, or with ``special`` their names.

        One space behind a BOS is taken away, as SentencePiece put it there. ``prev_tokens`` changes nothing.
        """
        raw = [
            self.tokenizer.token_bytes(token)
            for token in tokens
            if special or not self.tokenizer.is_control(token)
        ]
        text = b"".join(raw)
        return text.removeprefix(b" ") if list(tokens[:1]) == [self.tokenizer.bos_id] else text

    def token_bos(self) -> int:
        return -1 if self.tokenizer.bos_id is None else int(self.tokenizer.bos_id)

    def token_eos(self) -> int:
        return -1 if self.tokenizer.eos_id is None else int(self.tokenizer.eos_id)
