package edge.moa

import org.json.JSONObject

/** What happens while an answer is written. */
sealed interface AnswerEvent {
    /** New confirmed [text], which begins at offset [start] of the answer, and the text after it that may still change. */
    data class Update(val text: String, val start: Int, val tentative: String) : AnswerEvent

    /** The link changed: `online`, `reconnecting` or `offline`, and why. */
    data class Link(val status: String, val detail: String) : AnswerEvent

    /** The server's text differs from the text written offline (policy `ask`). */
    data class Disagreement(val dropped: String, val replacement: String) : AnswerEvent

    /** The device does not write on, mostly because the server is away. */
    data class Paused(val reason: String) : AnswerEvent

    /** The last event: the whole text. */
    data class Finished(val text: String, val reason: String) : AnswerEvent

    companion object {
        /** Read an event as the core reports it; null for events of other kinds. */
        fun of(event: JSONObject): AnswerEvent? = when (event.getString("event")) {
            "AnswerUpdate" -> Update(event.getString("text"), event.getInt("start"), event.getString("tentative"))
            "LinkChanged" -> Link(event.getString("status"), event.getString("detail"))
            "Disagreement" -> Disagreement(event.getString("droppedText"), event.getString("replacementText"))
            "Paused" -> Paused(event.getString("reason"))
            "AnswerFinished" -> Finished(event.getString("text"), event.getString("reason"))
            else -> null
        }
    }
}
