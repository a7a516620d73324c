package edge.moa

import android.content.Context
import java.io.File
import java.util.UUID
import java.util.concurrent.atomic.AtomicBoolean
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.channels.awaitClose
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.callbackFlow
import kotlinx.coroutines.withContext
import org.json.JSONObject

/** What happens to text that was written offline if the server's differs: it is replaced, stays, or is replaced with a [AnswerEvent.Disagreement]. */
enum class Policy { ROLLBACK, KEEP, ASK }

/** A turn; [unconfirmed]: written offline and then left, so that [MoaChat.check] would check it. */
data class Turn(val role: String, val content: String, val unconfirmed: Boolean)

/** [messages] are the turns so far, [question] that of the running or last answer, [storeProblem] a sentence, or empty if all is well. */
data class ChatState(val messages: List<Turn>, val question: String, val storeProblem: String, val link: AnswerEvent.Link)

/** One conversation. It keeps its history over turns, survives lost connections and, with a `store`, the app's end. */
class MoaChat private constructor(
    private val engine: Engine,
    private val number: Int,
    /** Whether an answer of an earlier run of the app is in progress, see [pending]. */
    val hasPending: Boolean,
    context: Context,
) {
    private val closed = AtomicBoolean()
    private val conditions = DeviceConditions(
        context,
        engine.handler,
        { told -> engine.post("conditions", told.put("chat", number)) },
        { engine.post("networkChanged", ofChat()) },
    )

    /** Ask when it is collected; a collector that stops ends the answer. */
    fun send(text: String, maxNewTokens: Int = 512, temperature: Double = 0.0, seed: Long = 0): Flow<AnswerEvent> = follow(
        "send",
        ofChat().put("text", text).put("maxNewTokens", maxNewTokens).put("temperature", temperature).put("seed", seed.toString()),
    )

    /** Continue an answer that was cut off at its greatest length or stopped. */
    fun continueAnswer(maxNewTokens: Int = 512): Flow<AnswerEvent> = follow("continue", ofChat().put("maxNewTokens", maxNewTokens))

    /** Follow the answer that was in progress when the app ended, to [ChatState.question]; the first event has all that was written. */
    fun pending(): Flow<AnswerEvent> = follow("pending", ofChat())

    /** Have the server check the first answer that is unconfirmed. There are no events if none is, or without a link. */
    fun check(): Flow<AnswerEvent> = follow("check", ofChat())

    /**
     * Restore the device's text of the last [AnswerEvent.Disagreement]; the server continues after it. There are no events while the
     * answer is written, whose own events go on.
     */
    fun keepMine(): Flow<AnswerEvent> = follow("keepMine", ofChat())

    suspend fun state(): ChatState {
        val state = engine.request("state", ofChat()) as JSONObject
        val unconfirmed = state.getJSONArray("unconfirmed").objects().map { it.getInt("turn") }
        val messages = state.getJSONArray("messages").objects().mapIndexed { at, turn ->
            Turn(turn.getString("role"), turn.getString("content"), at in unconfirmed)
        }
        return ChatState(messages, state.getString("question"), state.getString("storeProblem"), AnswerEvent.linkOf(state))
    }

    /** Tell that the app went to the background or came back: `onStop` and `onStart` of `ProcessLifecycleOwner`. */
    fun setBackground(background: Boolean) {
        conditions.setBackground(background)
        if (background) engine.post("save", ofChat())
    }

    /** Disconnect until it is called with false. */
    suspend fun workOffline(offline: Boolean) {
        engine.request("workOffline", ofChat().put("offline", offline))
    }

    /** Disconnect, store the chat and free everything. The next run of the app continues a stored chat. */
    suspend fun close() = withContext(NonCancellable) {
        if (closed.getAndSet(true)) return@withContext
        conditions.close()
        try {
            engine.request("close", ofChat())
        } finally {
            engine.close()
        }
    }

    private fun ofChat() = JSONObject().put("chat", number)

    private fun follow(name: String, arguments: JSONObject): Flow<AnswerEvent> = callbackFlow {
        val answer = UUID.randomUUID().toString() // its name: another may be written when this one is left
        engine.post(name, arguments.put("answer", answer), { event -> AnswerEvent.of(event)?.let(::trySend) }) { close(it.exceptionOrNull()) }
        awaitClose { engine.post("stop", ofChat().put("answer", answer)) } // no effect after its end
    }.buffer(Channel.UNLIMITED)

    companion object {
        /**
         * Open a chat. It begins offline and connects by itself.
         *
         * @param bundle folder of a bundle made with `moa-export --target onnx`.
         * @param server `wss://HOST:PORT`.
         * @param store name of the chat, to continue it at the next start; open it once at a time.
         * @param drafts whether the device drafts and writes offline; if not, it only follows what the server writes.
         * @param onLink called in a thread of the library when the link changes; it may not block.
         * @throws MoaException `BundleError`, `EngineError` or `StoreError`, mostly.
         */
        suspend fun open(
            context: Context,
            bundle: File,
            server: String,
            token: String = "",
            store: String? = null,
            system: String = "",
            policy: Policy = Policy.ROLLBACK,
            drafts: Boolean = true,
            onLink: (AnswerEvent) -> Unit = {},
        ): MoaChat {
            val engine = Engine(context.applicationContext, bundle, store, onLink)
            try {
                val arguments = JSONObject().put("url", server).put("token", token).put("system", system).put("policy", policy.name.lowercase())
                if (store != null) arguments.put("store", store)
                if (drafts) arguments.put("graphs", "onnx")
                val opened = engine.request("open", arguments) as JSONObject
                return MoaChat(engine, opened.getInt("chat"), opened.getBoolean("pending"), context.applicationContext)
            } catch (error: Throwable) {
                withContext(NonCancellable) { engine.close() }
                throw error
            }
        }
    }
}
