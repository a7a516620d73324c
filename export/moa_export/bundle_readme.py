"""The README of a bundle: its graphs, its licences, and samples that run one step."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from moa_runtime.manifest import LICENCES, Manifest, TargetEntry, TensorSpec

README_FILE = "README.md"
#: Worked examples of the graphs, by their names; see :func:`moa_export.golden_step.worked_example`.
EXAMPLE_FILE = "example.json"


def write_readme(stage: Path, manifest: Manifest, examples: Mapping[str, Any]) -> None:
    """Write the README, and the ``examples`` if there are some, into a bundle whose other files are there."""
    if examples:
        (stage / EXAMPLE_FILE).write_text(json.dumps(examples, indent=1) + "\n", encoding="utf-8")
    port = ", `example.json` has numbers to check a\nport with" if examples else ""
    parts = [f"# A bundle for {manifest.target}", _FACTS.format(m=manifest, port=port), _licences(stage)]
    for name, entry in {**manifest.targets, **manifest.writers}.items():
        parts += [_described(name, entry), *_samples(name, entry, manifest, examples.get(name))]
    (stage / README_FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


_FACTS = """Made by moa-export. `manifest.json` describes it for programs{port}.

* Tokenizer: `tokenizer.json`, `chat_template.jinja`; {m.vocab_size} tokens, contexts of up to {m.max_context}.
* Drafter: `{m.architecture}`."""


def _licences(stage: Path) -> str:
    files = sorted(path.relative_to(stage).as_posix() for path in (stage / LICENCES).rglob("*") if path.is_file())
    named = ", ".join(f"[{name}]({name})" for name in files)
    return f"Licences of target and drafter: {named or 'none was found beside the models; ask their authors'}."


def _described(name: str, entry: TargetEntry) -> str:
    lines = [f"## {name}: `{entry.file}`, {entry.bytes / 1e6:.1f} MB"]
    functions = entry.details.get("functions") or entry.details.get("methods")
    if functions:
        for function, signature in functions.items():
            sides = ", ".join(map(_plain, signature["inputs"])), ", ".join(map(_plain, signature["outputs"]))
            lines += [f"* `{function}`: {sides[0]} -> {sides[1]}"]
    else:
        order = ", in this order" if entry.file.endswith(".pte") else ""
        sides = ("in", entry.inputs), ("out", entry.outputs)
        lines += [f"* {side}{order}: {_tensors(specs)}" for side, specs in sides]
    if entry.states:
        lines.append(f"* states: {_tensors(entry.states)}")
    return lines[0] + "\n\n" + "\n".join(lines[1:])


def _tensors(specs: tuple[TensorSpec, ...]) -> str:
    """Name the tensors in their order; of those that each layer has, the first layer's."""
    runs = [list(run) for _, run in groupby(specs, key=lambda spec: spec.name.removesuffix(_layer(spec.name)))]
    if len(runs) < len(specs):  # all keys, then all values
        ends = [f" to `{run[-1].name}`" if len(run) > 1 else "" for run in runs]
        return ", ".join(_plain(vars(run[0])) + end for run, end in zip(runs, ends, strict=True))
    shown = [spec for spec in specs if _layer(spec.name) in ("", "0")]
    text = ", ".join(_plain(vars(spec)) for spec in shown)
    layers = {_layer(spec.name) for spec in specs} - {""}
    return f"{text}, and so on for {len(layers)} layers" if layers else text


def _layer(name: str) -> str:
    """Return the number of the layer whose cache is meant (``self_keys.3``, in Core ML ``self_keys_3``), or nothing."""
    numbered = re.search(r"[._](\d+)$", name)
    return numbered[1] if numbered else ""


def _plain(spec: Mapping[str, Any]) -> str:
    return f"`{spec['name']}` {spec['dtype']} [{', '.join(map(str, spec['shape']))}]"


def _samples(name: str, entry: TargetEntry, manifest: Manifest, example: Mapping[str, Any] | None) -> list[str]:
    """Return samples that compute the example's ``first_token``: a sentence, and a block for each language."""
    if example is None or name not in _SAMPLES or manifest.architecture == "eagle3":
        return []
    heads, size = example["kv_shape"]
    first = example["first_token"]
    facts = {
        "FILE": entry.file,
        "HEADS": heads,
        "SIZE": size,
        "ANSWER": f"{first['top_tokens'][0]} {first['top_logprobs'][0]:.4f}",
        "CAPACITY": entry.states[0].shape[2] if entry.states else 0,
        "IMPORT": f'import * as ort from "{_PACKAGES.get(name)}";',
        "OPTIONS": f", {json.dumps(entry.details['session'])}" if "session" in entry.details else "",
    }
    rows = any(spec.name == "memory_keys" for spec in (*entry.inputs, *entry.states))
    blocks = ["What follows the token 1, with one memory row of zeros:" if rows else "What follows the token 1:"]
    for language, code in _SAMPLES[name].items():
        lines = code.strip().splitlines()
        for fact, value in facts.items():
            lines = [line.replace(f"@{fact}@", str(value)) for line in lines]
        lines = [line.replace("@ROWS@", "") for line in lines if rows or "@ROWS@" not in line]
        blocks.append("\n".join([f"```{language}", *lines, "```"]))
    return blocks


_PACKAGES = {"onnx": "onnxruntime-node", "web": "onnxruntime-web"}
_TYPESCRIPT = """
@IMPORT@

const session = await ort.InferenceSession.create("@FILE@"@OPTIONS@);
const integer = (value: bigint) => new ort.Tensor("int64", BigInt64Array.of(value), [1]);
const zeros = (n: number) => new ort.Tensor("float32", new Float32Array(n * @HEADS@ * @SIZE@), [n, @HEADS@, @SIZE@]);
const result = await session.run({
  tokens: integer(1n), positions: integer(0n), queries: integer(0n),
  self_keys: zeros(0), self_values: zeros(0), self_mask: new ort.Tensor("bool", [true], [1, 1]),
  memory_keys: zeros(1), memory_values: zeros(1),@ROWS@
});
console.log(`${result.top_tokens!.data[0]} ${Number(result.top_logprobs!.data[0]).toFixed(4)}`); // @ANSWER@
"""

#: Samples by kind of graph and language. Lines with ``@ROWS@`` are for graphs with memory rows.
_SAMPLES: Mapping[str, Mapping[str, str]] = {
    "onnx": {
        "python": """
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("@FILE@")
rows = np.zeros((1, @HEADS@, @SIZE@), np.float32)
step = {
    "tokens": np.array([1]), "positions": np.array([0]), "queries": np.array([0]),
    "self_keys": rows[:0], "self_values": rows[:0], "self_mask": np.ones((1, 1), bool),
    "memory_keys": rows, "memory_values": rows,@ROWS@
}
tokens, logprobs, keys, values = session.run(None, step)
print(tokens[0, 0], f"{logprobs[0, 0]:.4f}")  # @ANSWER@
""",
        "typescript": _TYPESCRIPT,
        "kotlin": """
import ai.onnxruntime.*
import java.nio.FloatBuffer

val environment = OrtEnvironment.getEnvironment()
val session = environment.createSession("@FILE@")
fun integer(value: Long) = OnnxTensor.createTensor(environment, longArrayOf(value))
fun zeros(n: Long) = OnnxTensor.createTensor(
    environment, FloatBuffer.allocate(n.toInt() * @HEADS@ * @SIZE@), longArrayOf(n, @HEADS@, @SIZE@))
val result = session.run(mapOf(
    "tokens" to integer(1), "positions" to integer(0), "queries" to integer(0),
    "self_keys" to zeros(0), "self_values" to zeros(0),
    "memory_keys" to zeros(1), "memory_values" to zeros(1),@ROWS@
    "self_mask" to OnnxTensor.createTensor(environment, arrayOf(booleanArrayOf(true)))))
println((result["top_tokens"].get().value as Array<LongArray>)[0][0]) // @ANSWER@
""",
    },
    "web": {
        "typescript": _TYPESCRIPT,
    },
    "executorch": {
        "python": """
import torch
from executorch.runtime import Runtime

program = Runtime.get().load_program("@FILE@")
extend, draft = program.load_method("extend"), program.load_method("draft")
token, position = torch.tensor([1]), torch.tensor([0])
keys, values = extend.execute([token, position])
row = torch.zeros(1, @HEADS@, @SIZE@)
tokens, logprobs = draft.execute([token, position, torch.zeros(1, 1), keys, values, row, row])
print(int(tokens[0, 0]), f"{float(logprobs[0, 0]):.4f}")  # @ANSWER@
""",
        "kotlin": """
import org.pytorch.executorch.*

val module = Module.load("@FILE@")
val token = EValue.from(Tensor.fromBlob(longArrayOf(1), longArrayOf(1)))
val position = EValue.from(Tensor.fromBlob(longArrayOf(0), longArrayOf(1)))
val (keys, values) = module.execute("extend", token, position)
val mask = EValue.from(Tensor.fromBlob(floatArrayOf(0f), longArrayOf(1, 1)))
val row = EValue.from(Tensor.fromBlob(FloatArray(@HEADS@ * @SIZE@), longArrayOf(1, @HEADS@, @SIZE@)))
val (tokens, logprobs) = module.execute("draft", token, position, mask, keys, values, row, row)
println("${tokens.toTensor().dataAsLongArray[0]} ${logprobs.toTensor().dataAsFloatArray[0]}") // @ANSWER@
""",
        "swift": """
import ExecuTorch

let module = Module(filePath: "@FILE@")
let token = Tensor<Int64>([1]), position = Tensor<Int64>([0])
let entries = try module.execute("extend", [token, position])
let keys: Tensor<Float> = entries[0].tensor()!, values: Tensor<Float> = entries[1].tensor()!
let mask = Tensor<Float>([0], shape: [1, 1])
let row = Tensor<Float>([Float](repeating: 0, count: @HEADS@ * @SIZE@), shape: [1, @HEADS@, @SIZE@])
let best = try module.execute("draft", [token, position, mask, keys, values, row, row])
let tokens: Tensor<Int64> = best[0].tensor()!, logprobs: Tensor<Float> = best[1].tensor()!
print(tokens.scalars()[0], logprobs.scalars()[0]) // @ANSWER@
""",
    },
    "coreml": {
        "swift": """
import CoreML

let configuration = MLModelConfiguration()
configuration.functionName = "step_1"
let compiled = try await MLModel.compileModel(at: URL(fileURLWithPath: "@FILE@"))
let model = try MLModel(contentsOf: compiled, configuration: configuration)
func integer(_ value: Int32) -> MLMultiArray { MLMultiArray(MLShapedArray<Int32>(scalars: [value], shape: [1])) }
let open = [Float](repeating: -10000, count: @CAPACITY@).enumerated().map { $0.offset == 0 ? 0 : $0.element }
let mask = MLMultiArray(MLShapedArray<Float>(scalars: open, shape: [1, @CAPACITY@]))
let inputs = try MLDictionaryFeatureProvider(dictionary: [
    "tokens": integer(1), "positions": integer(0), "slot": integer(0), "self_mask": mask, "memory_mask": mask])
let result = try await model.prediction(from: inputs, using: model.makeState())
print(result.featureValue(for: "top_tokens")!.multiArrayValue![0]) // @ANSWER@
""",
    },
}
