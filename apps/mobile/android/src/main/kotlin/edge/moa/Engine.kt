package edge.moa

import android.content.Context
import android.os.Handler
import android.os.HandlerThread
import android.os.SystemClock
import android.util.Log
import com.whl.quickjs.android.QuickJSLoader
import com.whl.quickjs.wrapper.JSCallFunction
import com.whl.quickjs.wrapper.JSObject
import com.whl.quickjs.wrapper.QuickJSContext
import com.whl.quickjs.wrapper.QuickJSException
import java.io.File
import java.net.URLEncoder
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.concurrent.ConcurrentHashMap
import java.util.concurrent.Executor
import java.util.concurrent.Executors
import java.util.concurrent.atomic.AtomicInteger
import kotlinx.coroutines.CompletableDeferred
import org.json.JSONObject

/**
 * `moa-core.js` in QuickJS, in a thread of its own; its methods may be called from any thread. What is posted is done in that order.
 *
 * @param store name of the stored chat, which one engine of the process may have at a time.
 * @throws MoaException another one has it.
 */
internal class Engine(
    context: Context,
    private val bundle: File,
    private val store: String?,
    private val onLink: (AnswerEvent) -> Unit,
) {
    init {
        if (store != null && !stores.add(store)) throw MoaException("StoreError", "the chat $store is open already: close it first")
    }

    private val thread = HandlerThread("moa-edge").apply { start() }
    val handler = Handler(thread.looper)
    private val files = Executors.newSingleThreadExecutor()
    private val models = Executors.newSingleThreadExecutor()
    private val folder = File(context.filesDir, "moa-edge")
    private val sockets = Sockets({ tell("opened", it) }, { socket, frame -> tell("received", socket, frame) }) { socket, status ->
        tell("closed", socket, status)
    }
    private val numbers = AtomicInteger()
    private val graphs = ConcurrentHashMap<Int, OnnxGraph>()
    private val timers = HashMap<Int, Runnable>()
    private val caches = HashMap<Int, OnnxCache>()
    private val answers = HashMap<Int, (JSONObject) -> Unit>()
    private var closed: Throwable? = null // why nothing is done any more
    private var engine: QuickJSContext? = null
    private lateinit var core: JSObject

    init {
        handler.post {
            try {
                folder.mkdirs()
                QuickJSLoader.init()
                val made = QuickJSContext.create().also { engine = it }
                made.setMaxStackSize(512 shl 10) // the thread has 1 MiB
                made.evaluate(context.assets.open("moa-core.js").bufferedReader().use { it.readText() }, "moa-core.js")
                core = made.globalObject.getJSObject("moa")
                call("start", host(made))
            } catch (error: Throwable) {
                closed = error // of every request
            }
        }
    }

    /** Have the core do something; [event] gets events of an answer, and [done] the result, in the engine's thread. */
    fun post(name: String, arguments: JSONObject, event: (JSONObject) -> Unit = {}, done: (Result<Any?>) -> Unit = {}) {
        val json = arguments.toString()
        val posted = handler.post {
            val number = numbers.incrementAndGet()
            answers[number] = { said ->
                val happened = said.optJSONObject("event")
                val error = said.optJSONObject("error")
                if (happened != null) {
                    event(happened)
                } else {
                    answers.remove(number)
                    done(if (error == null) Result.success(said.opt("result")) else Result.failure(errorOf(error)))
                }
            }
            closed?.let(::fail)
            enter { call("request", number, name, json) }
        }
        if (!posted) done(Result.failure(MoaException("MoaError", CLOSED)))
    }

    /** Have the core do something, and return its result. */
    suspend fun request(name: String, arguments: JSONObject): Any? {
        val done = CompletableDeferred<Any?>()
        post(name, arguments) { result -> result.fold(done::complete, done::completeExceptionally) }
        return done.await()
    }

    /** Free everything, after what was posted before. What is posted later fails. */
    suspend fun close() {
        val done = CompletableDeferred<Unit>()
        handler.post {
            closed = MoaException("MoaError", CLOSED).also(::fail)
            sockets.close()
            try {
                engine?.close()
            } catch (error: QuickJSException) {
                Log.w("moa-edge", error)
            }
            models.execute { graphs.values.forEach(OnnxGraph::close) }
            models.shutdown()
            files.execute { // after the last write
                if (store != null) stores.remove(store)
                done.complete(Unit)
            }
            files.shutdown()
            thread.quitSafely()
        }
        done.await()
    }

    /** Do something in the engine's thread. An error is a defect: what waits fails, as its outcome may never be reported. */
    private fun enter(work: () -> Unit) {
        try {
            if (closed == null) work()
        } catch (error: Throwable) {
            fail(error)
        }
    }

    private fun fail(error: Throwable) {
        val known = error as? MoaException
        if (known == null) Log.e("moa-edge", "the engine failed", error)
        val told = JSONObject().put("name", known?.kind ?: "Defect").put("message", known?.message ?: "the engine failed: $error")
        answers.values.toList().forEach { it(JSONObject().put("error", told)) }
    }

    private fun report(json: String) {
        val said = JSONObject(json)
        if (said.has("request")) answers[said.getInt("request")]?.invoke(said)
        else AnswerEvent.of(said.getJSONObject("event"))?.let(onLink)
    }

    /** Call the core from any thread. */
    private fun tell(name: String, vararg arguments: Any?) = handler.post { enter { call(name, *arguments) } }

    private fun call(name: String, vararg arguments: Any?) {
        val function = core.getJSFunction(name)
        try {
            function.call(*arguments) // which runs the engine's pending jobs, too; a ByteArray becomes an ArrayBuffer
        } finally {
            function.release()
        }
    }

    private fun answer(call: Int, on: Executor, work: () -> Any?) = on.execute {
        try {
            tell("answered", call, work())
        } catch (error: Throwable) {
            tell("failed", call, error.message ?: error.toString())
        }
    }

    /** Return a copy of the bytes of a `Uint8Array`. */
    private fun bytes(array: Any?): ByteArray {
        val view = array as JSObject
        val start = view.getInteger("byteOffset")
        val end = start + view.getInteger("byteLength")
        return view.getBytes("buffer").copyOfRange(start, end).also { view.release() }
    }

    /** Return the functions of `NativeHost`. */
    private fun host(engine: QuickJSContext): JSObject {
        val host = engine.createNewJSObject()
        fun define(name: String, function: (Array<out Any?>) -> Any?) = host.setProperty(name, JSCallFunction { given ->
            try {
                function(given).takeIf { it is Number } // what JavaScript cannot take, such as Unit, is an error
            } catch (error: Throwable) { // may not reach the engine, which is in C
                fail(error)
                null
            }
        })
        fun number(value: Any?) = (value as Number).toInt()

        define("now") { SystemClock.elapsedRealtimeNanos() / 1e9 }
        define("startTimer") { (timer, seconds) ->
            val fire = Runnable {
                timers.remove(number(timer))
                enter { call("fired", timer) }
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
                val file = place(key as String)
                val part = File("$file.new") // of the same name, because a write that was cut off leaves it
                part.outputStream().use { it.write((text as String).toByteArray()); it.fd.sync() }
                check(part.renameTo(file)) { "the file cannot be renamed" }
                true
            }
        }

        define("loadGraph") { (call, file) ->
            answer(number(call), models) {
                val graph = OnnxGraph(File(bundle, file as String))
                numbers.incrementAndGet().also { graphs[it] = graph }
            }
        }
        define("releaseGraph") { (graph) -> graphs.remove(number(graph))?.let { models.execute(it::close) } }
        define("openCache") { (graph) ->
            numbers.incrementAndGet().also { caches[it] = graphs.getValue(number(graph)).open() }
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

    private fun place(key: String) = File(folder, URLEncoder.encode(key, "UTF-8") + ".json")

    private fun errorOf(error: JSONObject) = MoaException(error.getString("name"), error.getString("message"))

    private companion object {
        const val CLOSED = "the chat is closed"

        /** Names of the chats that are open in this process. */
        val stores: MutableSet<String> = ConcurrentHashMap.newKeySet()
    }
}

internal fun ordered(bytes: ByteArray): ByteBuffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)

/** int32 numbers of bytes, as onnxruntime takes them. */
internal fun integers(bytes: ByteArray) = LongArray(bytes.size / 4).also { all ->
    val ints = ordered(bytes).asIntBuffer()
    for (at in all.indices) all[at] = ints[at].toLong()
}

internal fun floats(bytes: ByteArray) = FloatArray(bytes.size / 4).also { ordered(bytes).asFloatBuffer().get(it) }
