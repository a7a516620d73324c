import Foundation
import JavaScriptCore

/// `moa-core.js` in JavaScriptCore, on a queue of its own. All methods may be called from any thread; what is posted is done in that order.
final class Engine: @unchecked Sendable {
    let queue = DispatchQueue(label: "moa-edge")
    private let files = DispatchQueue(label: "moa-edge.files")
    private let models = DispatchQueue(label: "moa-edge.models")
    private let context = JSContext()!
    private let bundle: URL
    private let folder = URL.applicationSupportDirectory.appending(path: "moa-edge")
    private let core: JSValue
    private let onLink: @Sendable (AnswerEvent) -> Void
    private var claim: StoreClaim?
    private var sockets: Sockets!
    private var timers: [Int: DispatchWorkItem] = [:]
    private var graphs: [Int: CoreMLGraph] = [:]
    private var caches: [Int: CoreMLCache] = [:]
    private var last = 0
    private var answers: [Int: ([String: Any]) -> Void] = [:]
    private var closed = false

    /// - Parameters:
    ///   - bundle: folder of the bundle.
    ///   - store: name of the stored chat, which one engine of the process may have at a time.
    ///   - onLink: called on the queue with each change of the chat's link.
    init(bundle: URL, store: String?, onLink: @escaping @Sendable (AnswerEvent) -> Void) throws {
        claim = try store.map(StoreClaim.init)
        self.bundle = bundle
        self.onLink = onLink
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        let script = try String(contentsOf: Bundle.module.url(forResource: "moa-core", withExtension: "js")!, encoding: .utf8)
        context.evaluateScript(script)
        core = context.objectForKeyedSubscript("moa")
        sockets = Sockets(
            opened: { [weak self] in self?.tell("opened", $0) },
            received: { [weak self] in self?.tell("received", $0, $1) },
            closed: { [weak self] in self?.tell("closed", $0, $1) })
        if context.exception == nil { queue.sync { _ = core.invokeMethod("start", withArguments: [host()]) } }
        if let error = context.exception { throw defect(error) }
        // A defect: what waits fails, as its outcome may never be reported.
        context.exceptionHandler = { [weak self] _, error in self?.fail(defect(error)) }
    }

    deinit { sockets.close() }

    /// Have the core do something. `event` gets events of an answer, and `done` the result, on the queue.
    func post(
        _ name: String, _ arguments: [String: Any], event: @escaping ([String: Any]) -> Void = { _ in },
        done: @escaping (Result<Any, Error>) -> Void = { _ in }
    ) {
        let json = (try? JSONSerialization.data(withJSONObject: arguments)).map { String(decoding: $0, as: UTF8.self) } ?? "{}"
        queue.async { [self] in
            if closed { return done(.failure(chatIsClosed)) }
            last += 1
            let number = last
            answers[number] = { [weak self] said in
                if let happened = said["event"] as? [String: Any] { return event(happened) }
                self?.answers[number] = nil
                if let error = said["error"] as? [String: String] {
                    done(.failure(MoaError(name: error["name"] ?? "", message: error["message"] ?? "")))
                } else {
                    done(.success(said["result"] ?? NSNull()))
                }
            }
            core.invokeMethod("request", withArguments: [number, name, json])
        }
    }

    /// Have the core do something, and return its result.
    func request(_ name: String, _ arguments: [String: Any]) async throws -> Any {
        try await withCheckedThrowingContinuation { continuation in
            post(name, arguments, done: { continuation.resume(with: $0) })
        }
    }

    var isClosed: Bool { queue.sync { closed } }

    /// Free everything, after what was posted before. What is posted later fails.
    func close() {
        queue.sync {
            if closed { return }
            closed = true
            fail(chatIsClosed)
            for timer in timers.values { timer.cancel() }
            sockets.close()
            (timers, graphs, caches) = ([:], [:], [:])
            files.sync {}  // the last write
            claim = nil
        }
    }

    private func fail(_ error: MoaError) {
        for answer in answers.values { answer(["error": ["name": error.name, "message": error.message]]) }
    }

    private func report(_ json: String) {
        guard let said = try? JSONSerialization.jsonObject(with: Data(json.utf8)) as? [String: Any] else { return }
        if let number = said["request"] as? Int {
            answers[number]?(said)
        } else if let event = AnswerEvent(said["event"] as? [String: Any] ?? [:]) {
            onLink(event)
        }
    }

    private func tell(_ name: String, _ arguments: Any...) {
        queue.async { [self] in
            if closed { return }
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

        let now: @convention(block) () -> Double = { Double(clock_gettime_nsec_np(CLOCK_MONOTONIC)) / 1e9 }
        let startTimer: @convention(block) (Int, Double) -> Void = { [unowned self] timer, seconds in
            let item = DispatchWorkItem { [weak self] in
                guard let self, !self.closed else { return }
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
            self.answer(call, on: self.files) { try Data(contentsOf: self.bundle.appending(path: file)) }
        }
        let readText: @convention(block) (Int, String) -> Void = { [unowned self] call, key in
            self.answer(call, on: self.files) {
                let file = self.place(of: key)
                return FileManager.default.fileExists(atPath: file.path) ? try String(contentsOf: file, encoding: .utf8) : NSNull()
            }
        }
        let writeText: @convention(block) (Int, String, String) -> Void = { [unowned self] call, key, text in
            self.answer(call, on: self.files) {
                try Data(text.utf8).write(to: self.place(of: key), options: .atomic)
                return true
            }
        }
        define("readFile", readFile)
        define("readText", readText)
        define("writeText", writeText)

        let loadGraph: @convention(block) (Int, String) -> Void = { [unowned self] call, file in
            self.answer(call, on: self.models) {
                let graph = try CoreMLGraph(bundle: self.bundle, file: file, folder: URL.cachesDirectory.appending(path: "moa-edge"))
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
            self.answer(call, on: self.models) {
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
        folder.appending(path: key.addingPercentEncoding(withAllowedCharacters: .alphanumerics)! + ".json")
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

/// The right to write a stored chat, which one engine of the process has at a time.
private final class StoreClaim {
    private static let lock = NSLock()
    private static var claimed = Set<String>()
    private let name: String

    init(_ name: String) throws {
        guard Self.lock.withLock({ Self.claimed.insert(name).inserted }) else {
            throw MoaError(name: "StoreError", message: "the chat \(name) is open already: close it first")
        }
        self.name = name
    }

    deinit { _ = Self.lock.withLock { Self.claimed.remove(name) } }
}

private let chatIsClosed = MoaError(name: "MoaError", message: "the chat is closed")

private func defect(_ error: JSValue?) -> MoaError {
    MoaError(name: "Defect", message: "the engine failed: \(error?.toString() ?? "")")
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
