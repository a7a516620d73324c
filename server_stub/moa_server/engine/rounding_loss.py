"""The loss by rounding a checkpoint to 8 or 4 bits: its perplexity by that of the original, measured once."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from moa_runtime.atomic_file import replace_private
from moa_runtime.manifest import TOKENIZER_FILE
from moa_runtime.paths import cache_dir
from moa_runtime.tokenizer import read_tokenizer
from moa_server.engine.base import EngineError
from moa_server.engine.baseline import log_probabilities
from moa_server.engine.dtypes import MOST_RATIO
from moa_server.engine.engine import LocalEngine

#: The text: prose, instructions, a dialogue, code, and other languages.
_TEXT = """\
The river rises in the hills and runs south for two hundred miles before it reaches the sea. In spring, when the snow \
melts, it floods the meadows; in late summer a child can wade across it. Towns grew where it could be bridged, and \
most of them still have a mill, a market square and a church whose bells can be heard from the other bank.

To make bread, mix 500 grams of flour with 350 grams of water, 10 grams of salt and a little yeast. Knead the dough \
until it is smooth, let it rise for an hour, shape it, and bake it at 230 degrees for about forty minutes. It is done \
if it sounds hollow when you knock on it.

"Did you see her?" he asked. "Only for a moment," she said. "She was at the station, with two suitcases, and she did \
not look as if she meant to come back." He thought about that. "Then the letter was true," he said at last.

def mean(values):
    if not values:
        raise ValueError("the mean of nothing")
    return sum(values) / len(values)

An atom consists of a nucleus and electrons. The nucleus holds nearly all of the mass: protons, which are positive, \
and neutrons, which carry no charge. The number of protons decides which element it is; carbon has six, oxygen eight.

Der Zug nach Hamburg faehrt heute von Gleis sieben. Le petit village se trouve au bord de la mer. El gato duerme en la \
ventana. 17 + 25 = 42, and 12 * 12 = 144.
"""

_log = logging.getLogger(__name__)


def check_rounding(engine: LocalEngine, original: Callable[[], LocalEngine], *, accepted: bool) -> float:
    """Check what rounding costs: the target's perplexity by that of the original, which is kept in the cache folder.

    Args:
        engine: of the rounded target.
        original: makes an engine of the target in float32; asked only if the ratio is not known.
        accepted: whether the user accepts any loss.

    Raises:
        EngineError: ``rounding_loss`` if the ratio is above :data:`MOST_RATIO` and not accepted.
    """
    dtype, target = engine.facts.dtype, engine.fingerprints.target
    path = cache_dir() / "rounding" / f"{target}-{dtype}-{version('moa-edge')}.json"
    ratio = _kept(path)
    if ratio is None:
        ratio = _measured(engine, original())
        _keep(path, ratio)
    text = f"in {dtype} the target's perplexity is {ratio:.3f} times that of the original"
    if not ratio <= MOST_RATIO and not accepted:
        other = "int8 or float32" if dtype == "int4" else "float32"
        raise EngineError(
            f"{text}, and at most {MOST_RATIO} is served: choose --dtype {other}, or add --accept-rounding",
            code="rounding_loss",
        )
    _log.info("%s", text)
    return ratio


def _measured(engine: LocalEngine, original: LocalEngine) -> float:
    tokenizer = read_tokenizer(engine.target.folder / TOKENIZER_FILE)
    tokens = tokenizer.encode(_TEXT).ids[: engine.max_context]
    ours, theirs = (float(log_probabilities(each, tokens[:1], tokens[1:]).mean()) for each in (engine, original))
    original.close()
    return math.exp(theirs - ours)


def _kept(path: Path) -> float | None:
    try:
        ratio = json.loads(path.read_text(encoding="utf-8"))["perplexity_ratio"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return ratio if type(ratio) is float and 0 < ratio < math.inf else None


def _keep(path: Path, ratio: float) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_private(path, [json.dumps({"perplexity_ratio": ratio}).encode()])
    except OSError as error:
        _log.info("the next start will measure the loss by rounding again: %s", error)
