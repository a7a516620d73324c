package edge.moa

import android.content.Context
import android.os.Handler
import android.os.HandlerThread
import android.os.SystemClock
import com.whl.quickjs.android.QuickJSLoader
import com.whl.quickjs.wrapper.JSCallFunction
import com.whl.quickjs.wrapper.JSObject
import com.whl.quickjs.wrapper.QuickJSContext
import java.io.File
import java.net.URLEncoder
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.concurrent.Executor
import java.util.concurrent.Executors
import kotlinx.coroutines.CompletableDeferred
import org.json.JSONObject

/** `moa-core.js` in QuickJS, in a thread of its own. [request] may be called from any coroutine. */
internal class Engine(context: Context, private val bundle: File, private val onLink: (Int, AnswerEvent) -> Unit) {
    private val thread = HandlerThread("moa-edge").apply { start() }
    private val handler = Handler(thread.looper)
    private val files = Executors.newSingleThreadExecutor()
    private val models = Executors.newSingleThreadExecutor()
    private val store = File(context.filesDir, "moa-edge").apply { mkdirs() }
    private val sockets = Sockets({ tell("opened", it) }, { socket, frame -> tell("received", socket, frame) }) { socket, status ->
        tell("closed", socket, status)
    }
    private val timers = HashMap<Int, Runnable>()
    private val graphs = HashMap<Int, OnnxGraph>()
    private val caches = HashMap<Int, OnnxCache>()
    private val answers = HashMap<Int, (JSONObject) -> Unit>()
    private var last = 0
    private lateinit var engine: QuickJSContext
    private lateinit var core: JSObject

    init {
        val script = context.assets.open("moa-core.js").bufferedReader().use { it.readText() }
        handler.post {
            QuickJSLoader.init()
            engine = QuickJSContext.create()
            engine.setMaxStackSize(1 shl 20)
            engine.evaluate(script, "moa-core.js")
            core = engine.globalObject.getJSObject("moa")
            core.getJSFunction("start").call(host())
        }
    }

    /** Have the core do something; [event] gets events of an answer, in the engine's thread. */
    suspend fun request(name: String, arguments: JSONObject, event: (JSONObject) -> Unit = {}): Any? {
        val done = CompletableDeferred<Any?>()
        handler.post {
            val number = ++last
            answers[number] = { said ->
                val happened = said.optJSONObject("event")
                val error = said.optJSONObject("error")
                if (happened != null) {
                    event(happened)
                } else {
                    answers.remove(number)
                    if (error == null) done.complete(said.opt("result"))
                    else done.completeExceptionally(MoaException(error.getString("name"), error.getString("message")))
                }
            }
            call("request", number, name, arguments.toString())
        }
        return done.await()
    }

    private fun report(json: String) {
        val said = JSONObject(json)
        if (said.has("request")) {
            answers[said.getInt("request")]?.invoke(said)
        } else {
            AnswerEvent.of(said.getJSONObject("event"))?.let { onLink(said.getInt("chat"), it) }
        }
    }

    /** Call the core from any thread. */
    private fun tell(name: String, vararg arguments: Any?) = handler.post { call(name, *arguments) }

    private fun call(name: String, vararg arguments: Any?) {
        val given = arguments.map { if (it is ByteArray) engine.newArrayBuffer(it) else it }
        core.getJSFunction(name).call(*given.toTypedArray()) // which runs the engine's pending jobs, too
        given.filterIsInstance<JSObject>().forEach(JSObject::release)
    }

    private fun answer(call: Int, on: Executor, work: () -> Any?) = on.execute {
        try {
            tell("answered", call, work())
        } catch (error: Exception) {
            tell("failed", call, error.message ?: error.toString())
        }
    }

    /** Return a copy of the bytes of a `Uint8Array`. */
    private fun bytes(array: Any?): ByteArray {
        val view = array as JSObject
        val buffer = view.getJSObject("buffer")
        val start = view.getInteger("byteOffset")
        val copy = engine.toByteArray(buffer).copyOfRange(start, start + view.getInteger("byteLength"))
        buffer.release()
        view.release()
        return copy
    }

    /** Return the functions of `NativeHost`. */
    private fun host(): JSObject {
        val host = engine.createNewJSObject()
        fun define(name: String, function: (Array<out Any?>) -> Any?) = host.setProperty(name, JSCallFunction { function(it) })
        fun number(value: Any?) = (value as Number).toInt()

        define("now") { SystemClock.elapsedRealtimeNanos() / 1e9 }
        define("startTimer") { (timer, seconds) ->
            val fire = Runnable {
                timers.remove(number(timer))
                call("fired", timer)
            }
            timers[number(timer)] = fire
            handler.postDelayed(fire, ((seconds as Number).toDouble() * 1000).toLong())
        }
        define("stopTimer") { (timer) -> timers.remove(number(timer))?.let(handler::removeCallbacks) }

        define("connect") { (socket, url, protocols) -> sockets.connect(number(socket), url as String, protocols as String) }
        define("send") { (socket, frame) -> sockets.send(number(socket), bytes(frame)) }
        define("close") { (socket) -> sockets.close(number(socket)) }

        define("readFile") { (call, file) -> answer(number(call), files) { File(bundle, file as String).readBytes() } }
        define("readText") { (call, key) ->
            answer(number(call), files) { place(key as String).takeIf(File::exists)?.readText() }
        }
        define("writeText") { (call, key, text) ->
            answer(number(call), files) {
                val part = File.createTempFile("chat", null, store)
                part.outputStream().use { it.write((text as String).toByteArray()); it.fd.sync() }
                check(part.renameTo(place(key as String))) { "the file cannot be renamed" }
                true
            }
        }

        define("loadGraph") { (call, file) ->
            models.execute {
                try {
                    val graph = OnnxGraph(File(bundle, file as String))
                    handler.post {
                        graphs[++last] = graph
                        call("answered", number(call), last)
                    }
                } catch (error: Exception) {
                    tell("failed", number(call), error.message ?: error.toString())
                }
            }
        }
        define("releaseGraph") { (graph) -> graphs.remove(number(graph))?.let { models.execute(it::close) } }
        define("openCache") { (graph) ->
            caches[++last] = graphs.getValue(number(graph)).open()
            last
        }
        define("closeCache") { (cache) -> caches.remove(number(cache)) }
        define("putRows") { (cache, start, keys, values) ->
            caches.getValue(number(cache)).putRows(number(start), floats(bytes(keys)), floats(bytes(values)))
        }
        define("truncate") { (cache, length) -> caches.getValue(number(cache)).truncate(number(length)) }
        define("step") { given ->
            val cache = caches.getValue(number(given[1]))
            val (tokens, positions, queries) = (2..4).map { integers(bytes(given[it])) }
            val mask = bytes(given[5])
            answer(number(given[0]), models) { cache.step(tokens, positions, queries, mask, number(given[6])) }
        }
        define("report") { (json) -> report(json as String) }
        return host
    }

    private fun place(key: String) = File(store, URLEncoder.encode(key, "UTF-8") + ".json")
}

internal fun ordered(bytes: ByteArray): ByteBuffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)

/** int32 numbers of bytes, as onnxruntime takes them. */
internal fun integers(bytes: ByteArray) = LongArray(bytes.size / 4).also { all ->
    val ints = ordered(bytes).asIntBuffer()
    for (at in all.indices) all[at] = ints[at].toLong()
}

internal fun floats(bytes: ByteArray) = FloatArray(bytes.size / 4).also { ordered(bytes).asFloatBuffer().get(it) }
