package edge.moa

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.LongBuffer

/** Keys and values of one conversation. Steps run in one thread; the other functions may be called from another. */
internal class OnnxCache(private val graph: OnnxGraph) {
    private val width = graph.heads * graph.size
    private val layered = graph.layers > 0
    private var capacity = 0
    private var length = 0
    private var keys = emptyList<FloatBuffer>() // [capacity, heads, size]; of each layer [1, heads, capacity, size]
    private var values = emptyList<FloatBuffer>()
    private var rowKeys = FloatArray(0)
    private var rowValues = FloatArray(0)

    @Synchronized
    fun truncate(length: Int) {
        this.length = minOf(this.length, length)
    }

    @Synchronized
    fun putRows(start: Int, keys: FloatArray, values: FloatArray) {
        rowKeys = rowKeys.copyOf(start * width) + keys
        rowValues = rowValues.copyOf(start * width) + values
    }

    /** Run a step as `NativeHost.step` describes it; return its answer. */
    @Synchronized
    fun step(tokens: LongArray, positions: LongArray, queries: LongArray, mask: ByteArray, rows: Int): ByteArray {
        val held = length
        val count = tokens.size
        grow(held + count)
        val opened = ArrayList<OnnxTensor>()
        fun <T : OnnxTensor> keep(tensor: T) = tensor.also(opened::add)
        val environment = graph.environment
        fun numbers(all: LongArray) = keep(OnnxTensor.createTensor(environment, LongBuffer.wrap(all), longArrayOf(all.size.toLong())))
        fun floats(all: FloatBuffer, vararg shape: Int) =
            keep(OnnxTensor.createTensor(environment, all, LongArray(shape.size) { shape[it].toLong() }))
        try {
            val seen = ByteBuffer.allocateDirect(mask.size).put(mask).apply { rewind() }
            val shape = longArrayOf(count.toLong(), (held + count).toLong())
            val inputs = HashMap<String, OnnxTensor>()
            inputs["tokens"] = numbers(tokens)
            inputs["positions"] = numbers(positions)
            inputs["queries"] = numbers(queries)
            inputs["self_mask"] = keep(OnnxTensor.createTensor(environment, seen, shape, OnnxJavaType.BOOL))
            val pinned = HashMap<String, OnnxTensor>()
            if (layered) {
                // Input and output are the same memory: the graph writes the new entries after the held ones.
                for ((name, caches) in listOf("keys" to keys, "values" to values)) {
                    caches.forEachIndexed { layer, cache ->
                        val tensor = floats(cache, 1, graph.heads, capacity, graph.size)
                        inputs["self_$name.$layer"] = tensor
                        pinned["$name.$layer"] = tensor
                    }
                }
            } else {
                inputs["self_keys"] = floats(part(keys[0], held), held, graph.heads, graph.size)
                inputs["self_values"] = floats(part(values[0], held), held, graph.heads, graph.size)
            }
            if (graph.readsRows) {
                inputs["memory_keys"] = floats(FloatBuffer.wrap(rowKeys, 0, rows * width), rows, graph.heads, graph.size)
                inputs["memory_values"] = floats(FloatBuffer.wrap(rowValues, 0, rows * width), rows, graph.heads, graph.size)
            }
            val wanted = graph.session.outputNames - pinned.keys
            graph.session.run(inputs, wanted, pinned).use { result ->
                fun output(name: String) = result[name].get() as OnnxTensor
                if (!layered) {
                    append(keys[0], held, output("keys").floatBuffer)
                    append(values[0], held, output("values").floatBuffer)
                }
                length = held + count
                return answer(output("top_tokens").longBuffer, output("top_logprobs").floatBuffer)
            }
        } finally {
            opened.forEach(OnnxTensor::close)
        }
    }

    private fun answer(tokens: LongBuffer, logprobs: FloatBuffer): ByteArray {
        val bytes = ByteBuffer.allocate(8 * tokens.remaining()).order(ByteOrder.LITTLE_ENDIAN)
        while (tokens.hasRemaining()) bytes.putInt(tokens.get().toInt())
        while (logprobs.hasRemaining()) bytes.putFloat(logprobs.get())
        return bytes.array()
    }

    private fun part(cache: FloatBuffer, rows: Int): FloatBuffer = cache.duplicate().apply { limit(rows * width) }.slice()

    private fun append(cache: FloatBuffer, held: Int, entries: FloatBuffer) {
        cache.duplicate().apply { position(held * width) }.put(entries)
    }

    private fun grow(needed: Int) {
        if (needed <= capacity) return
        val larger = maxOf(256, 2 * capacity, needed)
        keys = enlarged(keys, larger)
        values = enlarged(values, larger)
        capacity = larger
    }

    private fun enlarged(caches: List<FloatBuffer>, larger: Int) = List(maxOf(1, graph.layers)) { layer ->
        val made = ByteBuffer.allocateDirect(4 * larger * width).order(ByteOrder.nativeOrder()).asFloatBuffer()
        val before = caches.getOrNull(layer)
        if (before != null) {
            // Of each layer the heads come first; one cache has its entries first.
            val blocks = if (layered) graph.heads else 1
            val block = width / blocks
            for (at in 0 until blocks) {
                val from = before.duplicate().apply { position(at * capacity * block); limit(at * capacity * block + length * block) }
                made.duplicate().apply { position(at * larger * block) }.put(from)
            }
        }
        made
    }
}
