package edge.moa

import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import ai.onnxruntime.TensorInfo
import java.io.File

/** The graph `device_half.onnx` of a bundle, or `writer.onnx`, whose layers have caches of their own. */
internal class OnnxGraph(file: File) : AutoCloseable {
    val environment: OrtEnvironment = OrtEnvironment.getEnvironment()
    private val options = OrtSession.SessionOptions().apply {
        setIntraOpNumThreads(2)
        addConfigEntry("session.intra_op.allow_spinning", "0") // between steps, which drains the battery
    }
    val session: OrtSession = environment.createSession(file.path, options)

    /** Number of layers with caches of their own; 0 for one cache. */
    val layers = session.inputNames.count { it.startsWith("self_keys.") }
    val readsRows = "memory_keys" in session.inputNames

    /** Heads and numbers of a head, of one cache. */
    val heads: Int
    val size: Int

    init {
        val shape = shapeOf(if (layers == 0) "self_keys" else "self_keys.0") // [S, heads, size], [1, heads, C, size]
        heads = shape[1].toInt()
        size = shape.last().toInt()
    }

    fun open() = OnnxCache(this)

    override fun close() {
        session.close()
        options.close()
    }

    private fun shapeOf(input: String) = (session.inputInfo.getValue(input).info as TensorInfo).shape
}
