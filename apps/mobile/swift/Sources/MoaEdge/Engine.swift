import Foundation
import JavaScriptCore

/// `moa-core.js` in JavaScriptCore, on a queue of its own. All methods may be called from any thread.
final class Engine: @unchecked Sendable {
    private let queue = DispatchQueue(label: "moa-edge")
    private let context = JSContext()!
    private let bundle: URL
    private let store: URL
    private let core: JSValue
    private lazy var sockets = Sockets(
        opened: { [weak self] in self?.tell("opened", $0) },
        received: { [weak self] in self?.tell("received", $0, $1) },
        closed: { [weak self] in self?.tell("closed", $0, $1) })
    private var timers: [Int: DispatchWorkItem] = [:]
    private var graphs: [Int: CoreMLGraph] = [:]
    private var caches: [Int: CoreMLCache] = [:]
    private var last = 0
    private var answers: [Int: ([String: Any]) -> Void] = [:]

    /// Called on a queue of its own with each change of a chat's link.
    var onLink: (@Sendable (Int, AnswerEvent) -> Void)?

    /// - Parameters:
    ///   - bundle: folder of the bundle.
    ///   - store: folder for stored chats; made if it is missing.
    init(bundle: URL, store: URL) throws {
        self.bundle = bundle
        self.store = store
        try FileManager.default.createDirectory(at: store, withIntermediateDirectories: true)
        let script = try String(contentsOf: Bundle.module.url(forResource: "moa-core", withExtension: "js")!, encoding: .utf8)
        context.evaluateScript(script)
        core = context.objectForKeyedSubscript("moa")
        queue.sync { _ = core.invokeMethod("start", withArguments: [host()]) }
    }

    /// Have the core do something. `event` gets events of an answer, on the engine's queue.
    func request(
        _ name: String, _ arguments: [String: Any], event: @escaping @Sendable ([String: Any]) -> Void = { _ in }
    ) async throws -> Any {
        let json = String(decoding: try JSONSerialization.data(withJSONObject: arguments), as: UTF8.self)
        return try await withCheckedThrowingContinuation { continuation in
            queue.async { [self] in
                last += 1
                let number = last
                answers[number] = { said in
                    if let happened = said["event"] as? [String: Any] {
                        event(happened)
                        return
                    }
                    self.answers[number] = nil
                    if let error = said["error"] as? [String: String] {
                        continuation.resume(throwing: MoaError(name: error["name"] ?? "", message: error["message"] ?? ""))
                    } else {
                        continuation.resume(returning: said["result"] ?? NSNull())
                    }
                }
                core.invokeMethod("request", withArguments: [number, name, json])
            }
        }
    }

    private func report(_ json: String) {
        guard let said = try? JSONSerialization.jsonObject(with: Data(json.utf8)) as? [String: Any] else { return }
        if let number = said["request"] as? Int {
            answers[number]?(said)
        } else if let chat = said["chat"] as? Int, let event = AnswerEvent(said["event"] as? [String: Any] ?? [:]) {
            onLink?(chat, event)
        }
    }

    private func tell(_ name: String, _ arguments: Any...) {
        queue.async { [self] in
            core.invokeMethod(name, withArguments: arguments.map { $0 is Data ? typedArray($0 as! Data) : $0 })
        }
    }

    private func answer(_ call: Int, on other: DispatchQueue, _ work: @escaping () throws -> Any) {
        other.async { [self] in
            do {
                tell("answered", call, try work())
            } catch {
                tell("failed", call, error.localizedDescription)
            }
        }
    }

    // MARK: - the functions of NativeHost

    private func host() -> JSValue {
        let host = JSValue(newObjectIn: context)!
        func define(_ name: String, _ block: Any) { host.setObject(block, forKeyedSubscript: name as NSString) }
        let files = DispatchQueue(label: "moa-edge.files")
        let models = DispatchQueue(label: "moa-edge.models")

        let now: @convention(block) () -> Double = { Double(clock_gettime_nsec_np(CLOCK_MONOTONIC)) / 1e9 }
        let startTimer: @convention(block) (Int, Double) -> Void = { [unowned self] timer, seconds in
            let item = DispatchWorkItem {
                self.timers[timer] = nil
                self.core.invokeMethod("fired", withArguments: [timer])
            }
            self.timers[timer] = item
            self.queue.asyncAfter(deadline: .now() + seconds, execute: item)
        }
        let stopTimer: @convention(block) (Int) -> Void = { [unowned self] timer in
            self.timers.removeValue(forKey: timer)?.cancel()
        }
        define("now", now)
        define("startTimer", startTimer)
        define("stopTimer", stopTimer)

        let connect: @convention(block) (Int, String, String) -> Void = { [unowned self] socket, url, protocols in
            self.sockets.connect(socket, url: url, protocols: protocols.split(separator: ",").map(String.init))
        }
        let send: @convention(block) (Int, JSValue) -> Void = { [unowned self] in self.sockets.send($0, bytes(of: $1)) }
        let close: @convention(block) (Int) -> Void = { [unowned self] in self.sockets.close($0) }
        define("connect", connect)
        define("send", send)
        define("close", close)

        let readFile: @convention(block) (Int, String) -> Void = { [unowned self] call, file in
            self.answer(call, on: files) { try Data(contentsOf: self.bundle.appending(path: file)) }
        }
        let readText: @convention(block) (Int, String) -> Void = { [unowned self] call, key in
            self.answer(call, on: files) {
                let file = self.place(of: key)
                return FileManager.default.fileExists(atPath: file.path) ? try String(contentsOf: file, encoding: .utf8) : NSNull()
            }
        }
        let writeText: @convention(block) (Int, String, String) -> Void = { [unowned self] call, key, text in
            self.answer(call, on: files) {
                try Data(text.utf8).write(to: self.place(of: key), options: .atomic)
                return true
            }
        }
        define("readFile", readFile)
        define("readText", readText)
        define("writeText", writeText)

        let loadGraph: @convention(block) (Int, String) -> Void = { [unowned self] call, file in
            self.answer(call, on: models) {
                let graph = try CoreMLGraph(package: self.bundle.appending(path: file))
                return self.queue.sync {
                    self.last += 1
                    self.graphs[self.last] = graph
                    return self.last
                }
            }
        }
        let releaseGraph: @convention(block) (Int) -> Void = { [unowned self] in self.graphs[$0] = nil }
        let openCache: @convention(block) (Int) -> Int = { [unowned self] graph in
            self.last += 1
            self.caches[self.last] = self.graphs[graph]!.open()
            return self.last
        }
        let closeCache: @convention(block) (Int) -> Void = { [unowned self] in self.caches[$0] = nil }
        let putRows: @convention(block) (Int, Int, JSValue, JSValue) -> Void = { [unowned self] cache, start, keys, values in
            self.caches[cache]!.putRows(from: start, keys: bytes(of: keys), values: bytes(of: values))
        }
        let truncate: @convention(block) (Int, Int) -> Void = { [unowned self] in self.caches[$0]!.truncate($1) }
        let step: @convention(block) (Int, Int, JSValue, JSValue, JSValue, JSValue, Int) -> Void = {
            [unowned self] call, cache, tokens, positions, queries, mask, rows in
            let open = self.caches[cache]!
            let given = [tokens, positions, queries, mask].map(bytes(of:))
            self.answer(call, on: models) {
                try open.step(
                    tokens: numbers(given[0]), positions: numbers(given[1]), queries: numbers(given[2]), mask: given[3],
                    rows: rows)
            }
        }
        define("loadGraph", loadGraph)
        define("releaseGraph", releaseGraph)
        define("openCache", openCache)
        define("closeCache", closeCache)
        define("putRows", putRows)
        define("truncate", truncate)
        define("step", step)

        let report: @convention(block) (String) -> Void = { [unowned self] in self.report($0) }
        define("report", report)
        return host
    }

    private func place(of key: String) -> URL {
        store.appending(path: key.addingPercentEncoding(withAllowedCharacters: .alphanumerics)! + ".json")
    }

    /// Return a `Uint8Array` of a copy of these bytes.
    private func typedArray(_ data: Data) -> JSValue {
        let copy = UnsafeMutableRawPointer.allocate(byteCount: max(data.count, 1), alignment: 16)
        data.copyBytes(to: copy.assumingMemoryBound(to: UInt8.self), count: data.count)
        let array = JSObjectMakeTypedArrayWithBytesNoCopy(
            context.jsGlobalContextRef, kJSTypedArrayTypeUint8Array, copy, data.count, { bytes, _ in bytes?.deallocate() }, nil,
            nil)
        return JSValue(jsValueRef: array, in: context)
    }
}

/// Return a copy of the bytes of a typed array.
private func bytes(of value: JSValue) -> Data {
    let context = value.context.jsGlobalContextRef
    let array = JSValueToObject(context, value.jsValueRef, nil)
    let count = JSObjectGetTypedArrayByteLength(context, array, nil)
    // The pointer is that of the whole buffer.
    guard count > 0, let buffer = JSObjectGetTypedArrayBytesPtr(context, array, nil) else { return Data() }
    return Data(bytes: buffer + JSObjectGetTypedArrayByteOffset(context, array, nil), count: count)
}

/// Return int32 numbers from their bytes.
func numbers(_ data: Data) -> [Int32] {
    [Int32](unsafeUninitializedCapacity: data.count / 4) { numbers, count in
        count = data.copyBytes(to: numbers) / 4
    }
}
