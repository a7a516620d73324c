import Foundation

/// What happens while an answer is written.
public enum AnswerEvent: Sendable {
    /// New confirmed `text`, which begins at UTF-16 offset `start` of the answer, and the text after it that may still change.
    case update(text: String, start: Int, tentative: String)
    /// The link changed: `online`, `reconnecting` or `offline`, and why.
    case link(status: String, detail: String)
    /// The server's text differs from the text written offline (policy `ask`).
    case disagreement(dropped: String, replacement: String)
    /// The device does not write on, mostly because the server is away.
    case paused(reason: String)
    /// The last event: the whole text.
    case finished(text: String, reason: String)

    /// - Parameter event: as the core reports it; nil for events of other kinds.
    init?(_ event: [String: Any]) {
        func text(_ name: String) -> String { event[name] as? String ?? "" }
        switch text("event") {
        case "AnswerUpdate":
            self = .update(text: text("text"), start: event["start"] as? Int ?? 0, tentative: text("tentative"))
        case "LinkChanged": self = .link(status: text("status"), detail: text("detail"))
        case "Disagreement": self = .disagreement(dropped: text("droppedText"), replacement: text("replacementText"))
        case "Paused": self = .paused(reason: text("reason"))
        case "AnswerFinished": self = .finished(text: text("text"), reason: text("reason"))
        default: return nil
        }
    }
}
