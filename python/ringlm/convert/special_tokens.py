"""Which tokens begin and end a text, whether they are added to one, and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringlm.errors import FileFormatError
from ringlm.vocab import END_OF_MESSAGE, END_OF_TURN

from .checkpoint import optional_json, read_json

# Name in a checkpoint -> name in GGUF.
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# What SentencePiece calls them where nobody says otherwise.
_SENTENCEPIECE = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def special_metadata(
    folder: Path,
    config: Mapping[str, Any],
    parsed: Mapping[str, Any] | None,
    ids: Mapping[str, int],
    is_sentencepiece: bool,
) -> dict[str, Any]:
    """``tokenizer.ggml.*_token_id``, ``add_bos_token``, ``add_eos_token`` and ``tokenizer.chat_template``.

    `config` is tokenizer_config.json, `parsed` tokenizer.json. A token named there comes before an id in
    config.json, and that before one in generation_config.json.
    """
    special = _special_ids(folder, config, ids, is_sentencepiece)
    texts = {i: text for text, i in ids.items()}
    special |= _ends(folder, special.get("eos"), texts)
    metadata: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": i for name, i in special.items()}
    for name, default in (("bos", is_sentencepiece), ("eos", False)):
        metadata[f"tokenizer.ggml.add_{name}_token"] = _is_added(
            name, config, parsed, texts, special, default
        )
    template = _chat_template(folder, config)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return metadata


def _special_ids(
    folder: Path, config: Mapping[str, Any], ids: Mapping[str, int], is_sentencepiece: bool
) -> dict[str, int]:
    model, generation = read_json(folder / "config.json"), optional_json(folder / "generation_config.json")
    text_model = model.get("text_config")
    places = [model, text_model if isinstance(text_model, dict) else {}, generation]
    found: dict[str, int] = {}
    for theirs, ours in _NAMES.items():
        token = config.get(f"{theirs}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            if token in ids:
                found[ours] = ids[token]
            continue
        said = [
            place[f"{theirs}_token_id"] for place in places if place.get(f"{theirs}_token_id") is not None
        ]
        value = said[0] if said else None
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and value in ids.values():
            found[ours] = value
        elif is_sentencepiece and f"{theirs}_token" not in config:
            text = _SENTENCEPIECE[theirs]
            if text in ids:
                found[ours] = ids[text]
    return found


def _ends(folder: Path, eos: int | None, texts: Mapping[int, str]) -> dict[str, int]:
    """Ids of generation_config.json (or config.json) that end a generation beside EOS, as "eot" and "eom".

    Readers find the well-known ends by their text; of the others two can be named."""
    listed: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = optional_json(folder / file).get("eos_token_id")
        if isinstance(value, list):
            listed = [i for i in value if type(i) is int and i in texts]
            break
    found: dict[str, int] = {}
    candidates = [*listed] if eos is None else [eos, *listed]
    for name, known in (("eot", END_OF_TURN), ("eom", END_OF_MESSAGE)):
        for text in known:
            matching = [i for i in candidates if texts[i] == text]
            if matching and len(candidates) > 1:
                found.setdefault(name, matching[0])
    known_texts = {*END_OF_TURN, *END_OF_MESSAGE}
    for i in listed:
        if i == eos or texts[i] in known_texts:
            continue
        free = next((name for name in ("eot", "eom") if name not in found), None)
        if free is not None and i not in found.values():
            found[free] = i
    return found


def _is_added(
    name: str,
    config: Mapping[str, Any],
    parsed: Mapping[str, Any] | None,
    texts: Mapping[int, str],
    special: Mapping[str, int],
    default: bool,
) -> bool:
    """As tokenizer_config.json says, else as the post-processor of tokenizer.json does it."""
    if name not in special:
        return False
    said = config.get(f"add_{name}_token")
    if isinstance(said, bool):
        return said
    for part in steps_of(parsed, "post_processor"):
        pieces = part.get("single")
        if part.get("type") != "TemplateProcessing" or not isinstance(pieces, list) or not pieces:
            continue
        piece = pieces[0 if name == "bos" else -1]
        token = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
        return isinstance(token, Mapping) and token.get("id") == texts[special[name]]
    return default and parsed is None


def steps_of(parsed: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a part of tokenizer.json, which may be one step or a sequence of them."""
    part = (parsed or {}).get(key)
    if not isinstance(part, Mapping):
        return []
    inner = part.get({"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}.get(key, "processors"))
    return [step for step in (part, *(inner if isinstance(inner, list) else [])) if isinstance(step, Mapping)]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, chat_template.json, or that of tokenizer_config.json; of several the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise FileFormatError(f"{file} is not UTF-8") from None
    found = config.get("chat_template")
    if found is None and (folder / "chat_template.json").is_file():
        found = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = next(
            (t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return found if isinstance(found, str) else None
