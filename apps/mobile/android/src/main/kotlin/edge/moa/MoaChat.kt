package edge.moa

import android.content.Context
import java.io.File
import java.util.UUID
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.channels.awaitClose
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.callbackFlow
import kotlinx.coroutines.launch
import org.json.JSONObject

/** One conversation. It keeps its history over turns, survives lost connections and, with a `store`, the app's end. */
class MoaChat private constructor(
    private val engine: Engine,
    private val number: Int,
    /** Whether an answer of an earlier run of the app is in progress, see [pending]. */
    val hasPending: Boolean,
    context: Context,
) {
    private val scope = CoroutineScope(Dispatchers.Default)
    private val conditions = DeviceConditions(
        context,
        { told -> scope.launch { engine.request("conditions", told.put("chat", number)) } },
        { scope.launch { engine.request("networkChanged", ofChat()) } },
    )

    /** Ask; a collector that stops ends the answer. */
    fun send(text: String, maxNewTokens: Int = 512, temperature: Double = 0.0, seed: Long = 0): Flow<AnswerEvent> = follow(
        "send",
        ofChat().put("text", text).put("maxNewTokens", maxNewTokens).put("temperature", temperature).put("seed", seed.toString()),
    )

    /** Continue an answer that was cut off at its greatest length or stopped. */
    fun continueAnswer(maxNewTokens: Int = 512): Flow<AnswerEvent> = follow("continue", ofChat().put("maxNewTokens", maxNewTokens))

    /** Follow the answer that was in progress when the app ended; the first event has all that was written. */
    fun pending(): Flow<AnswerEvent> = follow("pending", ofChat())

    /** Have the server check the first answer that was written offline. */
    fun check(): Flow<AnswerEvent> = follow("check", ofChat())

    /** The turns so far, as role and content. */
    suspend fun messages(): List<Pair<String, String>> {
        val turns = (engine.request("state", ofChat()) as JSONObject).getJSONArray("messages")
        return (0 until turns.length()).map { turns.getJSONObject(it) }.map { it.getString("role") to it.getString("content") }
    }

    /** Tell that the app went to the background or came back: `onStop` and `onStart` of `ProcessLifecycleOwner`. */
    fun setBackground(background: Boolean) {
        conditions.background = background
        if (background) scope.launch { engine.request("save", ofChat()) }
    }

    /** Disconnect until it is called with false. */
    suspend fun workOffline(offline: Boolean) {
        engine.request("workOffline", ofChat().put("offline", offline))
    }

    /** Disconnect. The next run of the app continues a stored chat. */
    suspend fun close() {
        conditions.close()
        engine.request("close", ofChat())
    }

    private fun ofChat() = JSONObject().put("chat", number)

    private fun follow(name: String, arguments: JSONObject): Flow<AnswerEvent> = callbackFlow {
        var ended = false
        val answer = UUID.randomUUID().toString() // its name: another may be written when this one is left
        launch {
            try {
                engine.request(name, arguments.put("answer", answer)) { event -> AnswerEvent.of(event)?.let(::trySend) }
                ended = true
                channel.close()
            } catch (error: MoaException) {
                ended = true
                channel.close(error)
            }
        }
        awaitClose { if (!ended) scope.launch { engine.request("stop", ofChat().put("answer", answer)) } }
    }

    companion object {
        /**
         * Open a chat. It begins offline and connects by itself.
         *
         * @param bundle folder of a bundle made with `moa-export --target onnx`.
         * @param server `wss://HOST:PORT`.
         * @param store name of the chat, to continue it at the next start.
         * @param drafts whether the device drafts and writes offline; if not, it only follows what the server writes.
         * @param onLink called in a thread of the library when the link changes.
         */
        suspend fun open(
            context: Context,
            bundle: File,
            server: String,
            token: String = "",
            store: String? = null,
            system: String = "",
            drafts: Boolean = true,
            onLink: (AnswerEvent) -> Unit = {},
        ): MoaChat {
            val engine = Engine(context.applicationContext, bundle) { _, event -> onLink(event) }
            val arguments = JSONObject().put("url", server).put("token", token).put("system", system)
            if (store != null) arguments.put("store", store)
            if (drafts) arguments.put("graphs", "onnx")
            val opened = engine.request("open", arguments) as JSONObject
            return MoaChat(engine, opened.getInt("chat"), opened.getBoolean("pending"), context.applicationContext)
        }
    }
}
