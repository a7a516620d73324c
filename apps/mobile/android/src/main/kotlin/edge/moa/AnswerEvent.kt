package edge.moa

import org.json.JSONArray
import org.json.JSONObject

/** A part of a text. [origin]: `drafted`, `corrected`, `offline` (the device's, not confirmed) or `kept` (the device's, kept by the policy). */
data class Span(val text: String, val origin: String)

/** What happens while an answer is written. */
sealed interface AnswerEvent {
    /** New confirmed [text], which begins at offset [start] of the answer, and the text after it that may still change, whole and in [spans]. */
    data class Update(val text: String, val start: Int, val tentative: String, val spans: List<Span>) : AnswerEvent

    /**
     * The link changed: [status] is `online`, `reconnecting` or `offline`, [detail] why, [retryInS] the seconds until the next attempt.
     * With [late] the link is up, but the server takes long, and the device writes on.
     */
    data class Link(val status: String, val detail: String, val retryInS: Double?, val late: Boolean) : AnswerEvent

    /** The server's text differs from the text written offline ([Policy.ASK]); [MoaChat.keepMine] restores that. */
    data class Disagreement(val dropped: String, val replacement: String) : AnswerEvent

    /**
     * The device does not write on, mostly because the server is away: `limit`, `end`, `length`, `unsure`, `unprepared`,
     * `background`, `low power`, `grammar` or `off`.
     */
    data class Paused(val reason: String) : AnswerEvent

    /** The last event: the whole text, and why it ends: `stop`, `length`, `context` or `grammar`. */
    data class Finished(val text: String, val reason: String, val spans: List<Span>) : AnswerEvent

    companion object {
        /** Read an event as the core reports it; null for events of other kinds. */
        internal fun of(event: JSONObject): AnswerEvent? = when (event.getString("event")) {
            "AnswerUpdate" -> Update(event.getString("text"), event.getInt("start"), event.getString("tentative"), spansOf(event))
            "LinkChanged" -> linkOf(event)
            "Disagreement" -> Disagreement(event.getString("droppedText"), event.getString("replacementText"))
            "Paused" -> Paused(event.getString("reason"))
            "AnswerFinished" -> Finished(event.getString("text"), event.getString("reason"), spansOf(event))
            else -> null
        }

        internal fun linkOf(link: JSONObject) = Link(
            link.getString("status"),
            link.getString("detail"),
            if (link.isNull("retryInS")) null else link.getDouble("retryInS"),
            link.optBoolean("late"),
        )

        private fun spansOf(event: JSONObject) = event.getJSONArray("spans").objects().map { Span(it.getString("text"), it.getString("origin")) }
    }
}

internal fun JSONArray.objects(): List<JSONObject> = List(length(), ::getJSONObject)
