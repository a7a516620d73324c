import Foundation
import Network

/// What happens to text that was written offline if the server's differs: it is replaced, stays, or is replaced with a `disagreement`.
public enum Policy: String, Sendable { case rollback, keep, ask }

/// A turn; `unconfirmed`: written offline and then left, so that ``MoaChat/check()`` would check it.
public struct Turn: Sendable, Equatable {
    public let role: String
    public let content: String
    public let unconfirmed: Bool
}

public struct ChatState: Sendable {
    /// The turns so far.
    public let messages: [Turn]
    /// The question of the running or last answer.
    public let question: String
    /// Why the chat was not continued or is not stored, a sentence; empty if all is well.
    public let storeProblem: String
    public let link: AnswerEvent.Link
}

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
    ///   - store: name of the chat, to continue it at the next start; open it once at a time.
    ///   - drafts: whether the device drafts and writes offline; if not, it only follows what the server writes.
    ///   - onLink: called on a queue of the library when the link changes; it may not block.
    /// - Throws: ``MoaError``, mostly `BundleError`, `EngineError` or `StoreError`.
    public static func open(
        bundle: URL, server: URL, token: String = "", store: String? = nil, system: String = "", policy: Policy = .rollback,
        drafts: Bool = true, onLink: @escaping @Sendable (AnswerEvent) -> Void = { _ in }
    ) async throws -> MoaChat {
        let engine = try Engine(bundle: bundle, store: store, onLink: onLink)
        var arguments: [String: Any] = [
            "url": server.absoluteString, "token": token, "system": system, "policy": policy.rawValue,
        ]
        arguments["store"] = store
        if drafts { arguments["graphs"] = "coreml" }
        do {
            let opened = try await engine.request("open", arguments) as? [String: Any] ?? [:]
            return MoaChat(engine, opened["chat"] as? Int ?? 0, pending: opened["pending"] as? Bool ?? false)
        } catch {
            engine.close()
            throw error
        }
    }

    private init(_ engine: Engine, _ number: Int, pending: Bool) {
        self.engine = engine
        self.number = number
        hasPending = pending
        conditions = DeviceConditions(on: engine.queue) { told in
            engine.post("conditions", told.merging(["chat": number]) { own, _ in own })
        } networkChanged: {
            engine.post("networkChanged", ["chat": number])
        }
    }

    /// Ask at once; leaving the loop stops the answer.
    public func send(_ text: String, maxNewTokens: Int = 512, temperature: Double = 0, seed: UInt64 = 0) -> Events {
        follow("send", ["text": text, "maxNewTokens": maxNewTokens, "temperature": temperature, "seed": String(seed)])
    }

    /// Continue an answer that was cut off at its greatest length or stopped.
    public func continueAnswer(maxNewTokens: Int = 512) -> Events { follow("continue", ["maxNewTokens": maxNewTokens]) }

    /// Follow the answer that was in progress when the app ended, to ``ChatState/question``; the first event has all that was written.
    public func pending() -> Events { follow("pending") }

    /// Have the server check the first answer that is unconfirmed. There are no events if none is, or without a link.
    public func check() -> Events { follow("check") }

    /// Restore the device's text of the last `disagreement`; the server continues after it. There are no events while the answer is
    /// written, whose own events go on.
    public func keepMine() -> Events { follow("keepMine") }

    public func state() async throws -> ChatState {
        let state = try await engine.request("state", ["chat": number]) as? [String: Any] ?? [:]
        let unconfirmed = (state["unconfirmed"] as? [[String: Any]] ?? []).compactMap { $0["turn"] as? Int }
        let messages = (state["messages"] as? [[String: Any]] ?? []).enumerated().map { at, turn in
            Turn(role: turn["role"] as? String ?? "", content: turn["content"] as? String ?? "", unconfirmed: unconfirmed.contains(at))
        }
        return ChatState(
            messages: messages, question: state["question"] as? String ?? "", storeProblem: state["storeProblem"] as? String ?? "",
            link: AnswerEvent.Link(state))
    }

    /// Tell that the app went to the background or came back: call it with `scenePhase == .background`.
    public func setBackground(_ background: Bool) {
        conditions.setBackground(background)
        if background { engine.post("save", ["chat": number]) }
    }

    /// Disconnect until it is called with `false`.
    public func workOffline(_ offline: Bool) async throws { _ = try await engine.request("workOffline", ["chat": number, "offline": offline]) }

    /// Disconnect, store the chat and free everything. The next run of the app continues a stored chat.
    public func close() async throws {
        conditions.close()
        defer { engine.close() }
        if !engine.isClosed { _ = try await engine.request("close", ["chat": number]) }
    }

    private func follow(_ name: String, _ arguments: [String: any Sendable] = [:]) -> Events {
        let (engine, number) = (engine, number)
        let answer = UUID().uuidString  // its name: another may be written when this one is left
        return Events { continuation in
            let given: [String: Any] = arguments.merging(["chat": number, "answer": answer]) { own, _ in own }
            engine.post(name, given) { event in
                if let known = AnswerEvent(event) { continuation.yield(known) }
            } done: { result in
                if case .failure(let error) = result { continuation.finish(throwing: error) } else { continuation.finish() }
            }
            continuation.onTermination = { ending in
                if case .cancelled = ending { engine.post("stop", ["chat": number, "answer": answer]) }
            }
        }
    }
}
