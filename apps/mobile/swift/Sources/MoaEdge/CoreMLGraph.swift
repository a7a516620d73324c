import CoreML
import CryptoKit
import Foundation

/// A stateful package of a bundle (`DeviceHalf.mlpackage`, `Writer.mlpackage`): functions that share weights and states.
final class CoreMLGraph {
    let functions: [String: MLModel]
    /// Positions that the caches hold.
    let capacity: Int
    /// Heads and numbers of a head of its memory rows; nil if it reads none.
    let rowShape: (heads: Int, size: Int)?

    /// - Parameter folder: where the compiled model is kept.
    init(bundle: URL, file: String, folder: URL) throws {
        let compiled = try Self.compiled(bundle, file, folder.appending(path: "compiled"))
        var functions: [String: MLModel] = [:]
        for name in ["step_1", "step_8", "extend_32", "remember_32"] {
            let configuration = MLModelConfiguration()
            configuration.functionName = name
            configuration.computeUnits = .cpuAndNeuralEngine  // the system refuses the GPU in the background
            if let model = try? MLModel(contentsOf: compiled, configuration: configuration) { functions[name] = model }
        }
        let inputs = functions["step_1"]?.modelDescription.inputDescriptionsByName ?? [:]
        let readsRows = inputs["memory_mask"] != nil
        guard functions.count == (readsRows ? 4 : 3), let mask = inputs["self_mask"] else {
            try? FileManager.default.removeItem(at: compiled)
            throw MoaError(name: "EngineError", message: "Core ML cannot load \(file)")
        }
        self.functions = functions
        capacity = mask.multiArrayConstraint!.shape[1].intValue
        let rows = functions["remember_32"]?.modelDescription.inputDescriptionsByName["new_keys"]?.multiArrayConstraint?.shape
        rowShape = rows.map { (heads: $0[1].intValue, size: $0[3].intValue) }
    }

    /// Return the compiled model of this bundle, which is made once; it takes the place of those of other bundles.
    private static func compiled(_ bundle: URL, _ file: String, _ folder: URL) throws -> URL {
        let files = FileManager.default
        let manifest = try Data(contentsOf: bundle.appending(path: "manifest.json"))
        let own = SHA256.hash(data: manifest).map { String(format: "%02x", $0) }.joined()
        let kept = folder.appending(path: own).appending(path: file + ".mlmodelc")
        if files.fileExists(atPath: kept.path) { return kept }
        let made = try MLModel.compileModel(at: bundle.appending(path: file))
        for other in (try? files.contentsOfDirectory(atPath: folder.path)) ?? [] where other != own {
            try? files.removeItem(at: folder.appending(path: other))
        }
        try files.createDirectory(at: kept.deletingLastPathComponent(), withIntermediateDirectories: true)
        do { try files.moveItem(at: made, to: kept) } catch where files.fileExists(atPath: kept.path) {}  // another engine's
        return kept
    }

    /// Return new, empty caches.
    func open() -> CoreMLCache { CoreMLCache(self) }
}

/// Caches of one conversation. Steps run on one queue; the other functions may be called from another thread.
final class CoreMLCache: @unchecked Sendable {
    private let graph: CoreMLGraph
    private let state: MLState
    private let lock = NSLock()
    private var length = 0
    private var keys = Data()  // all memory rows, float32 [n, heads, size]
    private var values = Data()
    private var written = 0  // rows that the state has

    init(_ graph: CoreMLGraph) {
        self.graph = graph
        state = graph.functions["step_1"]!.makeState()
    }

    func truncate(_ length: Int) { lock.withLock { self.length = min(self.length, length) } }

    func putRows(from start: Int, keys: Data, values: Data) {
        guard let (heads, size) = graph.rowShape else { return }
        let held = start * heads * size * 4
        lock.withLock {
            self.keys.replaceSubrange(held..., with: keys)
            self.values.replaceSubrange(held..., with: values)
            written = min(written, start)
        }
    }

    /// Run a step as `NativeHost.step` describes it; return its answer.
    func step(tokens: [Int32], positions: [Int32], queries: [Int32], mask: Data, rows used: Int) throws -> Data {
        lock.lock()
        defer { lock.unlock() }
        let (held, count) = (length, tokens.count)
        guard held + count <= graph.capacity else {
            throw MoaError(name: "EngineError", message: "the conversation is longer than the \(graph.capacity) positions of this model")
        }
        try remember(used)
        var best = [Int32](), logprobs = [Float](), candidates = 0
        var answers = [Int32: ([Int32], [Float])]()
        let first = Int(queries.min() ?? Int32(count))
        var start = 0
        while start < count {
            let (name, size, stop) = piece(held: held, start: start, count: count, unqueried: first)
            var inputs: [String: Any] = [
                "tokens": integers(tokens[start..<stop], size), "positions": integers(positions[start..<stop], size),
                "slot": integers([Int32(held + start)], 1),
            ]
            if name.hasPrefix("step") || graph.rowShape == nil {  // a drafter extends its cache without looking at it
                inputs["self_mask"] = allowed(mask, held: held, count: count, rows: start..<stop, size: size)
            }
            if name.hasPrefix("step"), graph.rowShape != nil { inputs["memory_mask"] = openUntil(used) }
            let provider = try MLDictionaryFeatureProvider(dictionary: inputs)
            let result = try graph.functions[name]!.prediction(from: provider, using: state)
            if name.hasPrefix("step") {
                let top = MLShapedArray<Int32>(converting: result.featureValue(for: "top_tokens")!.multiArrayValue!)
                let scores = MLShapedArray<Float>(converting: result.featureValue(for: "top_logprobs")!.multiArrayValue!)
                for row in start..<stop { answers[Int32(row)] = (top[row - start].scalars, scores[row - start].scalars) }
            }
            start = stop
        }
        for query in queries {
            guard let (top, scores) = answers[query] else { continue }
            candidates = top.count
            best += top
            logprobs += scores
        }
        length = held + count
        assert(best.count == queries.count * candidates)
        return best.withUnsafeBytes { Data($0) } + logprobs.withUnsafeBytes { Data($0) }
    }

    /// Choose the function for the next tokens: a call writes its whole size, for which there must be room.
    private func piece(held: Int, start: Int, count: Int, unqueried: Int) -> (String, Int, Int) {
        let room = graph.capacity - held - start
        if start < unqueried, room >= 32 { return ("extend_32", 32, min(start + 32, unqueried)) }
        let size = start + 1 == count || room < 8 ? 1 : 8
        return ("step_\(size)", size, min(start + size, count))
    }

    /// Write those of the first `count` rows that the state lacks.
    private func remember(_ count: Int) throws {
        guard let (heads, size) = graph.rowShape else { return }
        while written < count {
            // A call writes its whole size: if less room is left, it writes some rows again.
            let slot = min(written, graph.capacity - 32)
            let piece = slot..<min(slot + 32, count)
            let inputs: [String: Any] = [
                "new_keys": headsFirst(keys, piece, heads, size), "new_values": headsFirst(values, piece, heads, size),
                "slot": integers([Int32(slot)], 1),
            ]
            _ = try graph.functions["remember_32"]!.prediction(from: MLDictionaryFeatureProvider(dictionary: inputs), using: state)
            written = piece.upperBound
        }
    }

    /// float32 `[n, heads, size]` -> float16 `[1, heads, 32, size]`, filled up with zeros.
    private func headsFirst(_ data: Data, _ rows: Range<Int>, _ heads: Int, _ size: Int) -> MLMultiArray {
        var scalars = [Float16](repeating: 0, count: heads * 32 * size)
        data.withUnsafeBytes { (floats: UnsafeRawBufferPointer) in
            for (to, row) in rows.enumerated() {
                for head in 0..<heads {
                    for number in 0..<size {
                        let from = ((row * heads + head) * size + number) * 4
                        scalars[(head * 32 + to) * size + number] = Float16(floats.loadUnaligned(fromByteOffset: from, as: Float.self))
                    }
                }
            }
        }
        return MLMultiArray(MLShapedArray<Float16>(scalars: scalars, shape: [1, heads, 32, size]))
    }

    /// uint8 `[T, S + T]` -> the rows of one call, `[size, capacity]`, to add to scores.
    private func allowed(_ mask: Data, held: Int, count: Int, rows: Range<Int>, size: Int) -> MLMultiArray {
        var scalars = [Float16](repeating: -10000, count: size * graph.capacity)
        let width = held + count
        for (to, row) in rows.enumerated() {
            for column in 0..<(held + rows.upperBound) where mask[mask.startIndex + row * width + column] != 0 {
                scalars[to * graph.capacity + column] = 0
            }
        }
        return MLMultiArray(MLShapedArray<Float16>(scalars: scalars, shape: [size, graph.capacity]))
    }

    private func openUntil(_ count: Int) -> MLMultiArray {
        let scalars = (0..<graph.capacity).map { Float16($0 < count ? 0 : -10000) }
        return MLMultiArray(MLShapedArray<Float16>(scalars: scalars, shape: [1, graph.capacity]))
    }

    private func integers(_ numbers: some Collection<Int32>, _ size: Int) -> MLMultiArray {
        let scalars = Array(numbers) + [Int32](repeating: 0, count: size - numbers.count)
        return MLMultiArray(MLShapedArray<Int32>(scalars: scalars, shape: [size]))
    }
}
