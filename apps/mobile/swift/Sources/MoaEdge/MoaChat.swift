import Foundation
import Network

/// One conversation. It keeps its history over turns, survives lost connections and, with a `store`, the app's end.
public final class MoaChat: Sendable {
    public typealias Events = AsyncThrowingStream<AnswerEvent, Error>

    /// Whether an answer of an earlier run of the app is in progress, see ``pending()``.
    public let hasPending: Bool
    private let engine: Engine
    private let number: Int
    private let conditions: DeviceConditions

    /// Open a chat. It begins offline and connects by itself.
    ///
    /// - Parameters:
    ///   - bundle: folder of a bundle made with `moa-export --target coreml`.
    ///   - server: `wss://HOST:PORT`.
    ///   - store: name of the chat, to continue it at the next start.
    ///   - drafts: whether the device drafts and writes offline; if not, it only follows what the server writes.
    public static func open(
        bundle: URL, server: URL, token: String = "", store: String? = nil, system: String = "", drafts: Bool = true,
        onLink: @escaping @Sendable (AnswerEvent) -> Void = { _ in }
    ) async throws -> MoaChat {
        let folder = URL.applicationSupportDirectory.appending(path: "moa-edge")
        let engine = try Engine(bundle: bundle, store: folder)
        engine.onLink = { _, event in onLink(event) }
        var arguments: [String: Any] = ["url": server.absoluteString, "token": token, "system": system]
        arguments["store"] = store
        if drafts { arguments["graphs"] = "coreml" }
        let opened = try await engine.request("open", arguments) as? [String: Any] ?? [:]
        return MoaChat(engine, opened["chat"] as? Int ?? 0, pending: opened["pending"] as? Bool ?? false)
    }

    private init(_ engine: Engine, _ number: Int, pending: Bool) {
        self.engine = engine
        self.number = number
        hasPending = pending
        conditions = DeviceConditions { told in
            Task { _ = try? await engine.request("conditions", told.merging(["chat": number]) { own, _ in own }) }
        } networkChanged: {
            Task { _ = try? await engine.request("networkChanged", ["chat": number]) }
        }
    }

    /// Ask; leaving the loop stops the answer.
    public func send(_ text: String, maxNewTokens: Int = 512, temperature: Double = 0, seed: UInt64 = 0) -> Events {
        follow("send", ["text": text, "maxNewTokens": maxNewTokens, "temperature": temperature, "seed": String(seed)])
    }

    /// Continue an answer that was cut off at its greatest length or stopped.
    public func continueAnswer(maxNewTokens: Int = 512) -> Events { follow("continue", ["maxNewTokens": maxNewTokens]) }

    /// Follow the answer that was in progress when the app ended; the first event has all that was written.
    public func pending() -> Events { follow("pending") }

    /// Have the server check the first answer that was written offline.
    public func check() -> Events { follow("check") }

    /// The turns so far.
    public func messages() async throws -> [(role: String, content: String)] {
        let state = try await engine.request("state", ["chat": number]) as? [String: Any] ?? [:]
        let turns = state["messages"] as? [[String: String]] ?? []
        return turns.map { ($0["role"] ?? "", $0["content"] ?? "") }
    }

    /// Tell that the app went to the background or came back: call it with `scenePhase == .background`.
    public func setBackground(_ background: Bool) {
        conditions.background = background
        if background { Task { _ = try? await engine.request("save", ["chat": number]) } }
    }

    /// Disconnect until it is called with `false`.
    public func workOffline(_ offline: Bool) async throws { _ = try await engine.request("workOffline", ["chat": number, "offline": offline]) }

    /// Disconnect. The next run of the app continues a stored chat.
    public func close() async throws { _ = try await engine.request("close", ["chat": number]) }

    private func follow(_ name: String, _ arguments: [String: any Sendable] = [:]) -> Events {
        let (engine, number) = (engine, number)
        let answer = UUID().uuidString  // its name: another may be written when this one is left
        return Events { continuation in
            let task = Task {
                do {
                    let given: [String: Any] = arguments.merging(["chat": number, "answer": answer]) { own, _ in own }
                    _ = try await engine.request(name, given) { event in
                        if let known = AnswerEvent(event) { continuation.yield(known) }
                    }
                    continuation.finish()
                } catch {
                    continuation.finish(throwing: error)
                }
            }
            continuation.onTermination = { ending in
                guard case .cancelled = ending else { return }
                Task { _ = try? await engine.request("stop", ["chat": number, "answer": answer]) }
                task.cancel()
            }
        }
    }
}
