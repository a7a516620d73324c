import Foundation

/// A part of a text. `origin`: `drafted`, `corrected`, `offline` (the device's, not confirmed) or `kept` (the device's, kept by the policy).
public struct Span: Sendable, Equatable {
    public let text: String
    public let origin: String
}

/// What happens while an answer is written.
public enum AnswerEvent: Sendable {
    /// New confirmed `text`, which begins at UTF-16 offset `start` of the answer, and the text after it that may still change, whole
    /// and in `spans`.
    case update(text: String, start: Int, tentative: String, spans: [Span])
    /// The link changed.
    case link(Link)
    /// The server's text differs from the text written offline (policy `ask`); ``MoaChat/keepMine()`` restores that.
    case disagreement(dropped: String, replacement: String)
    /// The device does not write on, mostly because the server is away: `limit`, `end`, `length`, `unsure`, `unprepared`,
    /// `background`, `low power`, `grammar` or `off`.
    case paused(reason: String)
    /// The last event: the whole text, and why it ends: `stop`, `length`, `context` or `grammar`.
    case finished(text: String, reason: String, spans: [Span])

    /// - Parameter event: as the core reports it; nil for events of other kinds.
    init?(_ event: [String: Any]) {
        func text(_ name: String) -> String { event[name] as? String ?? "" }
        let spans = (event["spans"] as? [[String: Any]] ?? []).map {
            Span(text: $0["text"] as? String ?? "", origin: $0["origin"] as? String ?? "")
        }
        switch text("event") {
        case "AnswerUpdate":
            self = .update(text: text("text"), start: event["start"] as? Int ?? 0, tentative: text("tentative"), spans: spans)
        case "LinkChanged": self = .link(Link(event))
        case "Disagreement": self = .disagreement(dropped: text("droppedText"), replacement: text("replacementText"))
        case "Paused": self = .paused(reason: text("reason"))
        case "AnswerFinished": self = .finished(text: text("text"), reason: text("reason"), spans: spans)
        default: return nil
        }
    }
}

extension AnswerEvent {
    /// The link to the server.
    public struct Link: Sendable, Equatable {
        /// `online`, `reconnecting` or `offline`.
        public let status: String
        /// Why, a clause for the user.
        public let detail: String
        /// Seconds until the next attempt; nil if there will be none.
        public let retryIn: Double?
        /// Whether the link is up, but the server takes long, so that the device writes on.
        public let late: Bool

        init(_ link: [String: Any]) {
            status = link["status"] as? String ?? ""
            detail = link["detail"] as? String ?? ""
            retryIn = link["retryInS"] as? Double
            late = link["late"] as? Bool ?? false
        }
    }
}
