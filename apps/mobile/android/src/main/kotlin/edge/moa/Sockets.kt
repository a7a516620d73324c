package edge.moa

import java.util.concurrent.ConcurrentHashMap
import okhttp3.OkHttpClient
import okhttp3.Request
import okhttp3.Response
import okhttp3.WebSocket
import okhttp3.WebSocketListener
import okio.ByteString
import okio.ByteString.Companion.toByteString

/** The core's WebSockets, by number. */
internal class Sockets(
    private val opened: (Int) -> Unit,
    private val received: (Int, ByteArray) -> Unit,
    private val closed: (Int, Int) -> Unit,
) : AutoCloseable {
    private val open = ConcurrentHashMap<Int, WebSocket>()

    fun connect(socket: Int, url: String, protocols: String) {
        val request = try {
            Request.Builder().url(url).apply { if (protocols.isNotEmpty()) header("Sec-WebSocket-Protocol", protocols) }.build()
        } catch (error: IllegalArgumentException) {
            return closed(socket, 0)
        }
        val listener = Listener(socket)
        open[socket] = client.newWebSocket(request, listener)
        if (listener.ended) open.remove(socket) // it failed before it was put there
    }

    fun send(socket: Int, frame: ByteArray) {
        open[socket]?.send(frame.toByteString())
    }

    fun close(socket: Int) {
        open.remove(socket)?.close(1000, null)
    }

    override fun close() = open.keys.forEach(::close)

    private inner class Listener(private val socket: Int) : WebSocketListener() {
        @Volatile
        var ended = false

        override fun onOpen(webSocket: WebSocket, response: Response) = opened(socket)

        override fun onMessage(webSocket: WebSocket, bytes: ByteString) = received(socket, bytes.toByteArray())

        override fun onClosing(webSocket: WebSocket, code: Int, reason: String) {
            webSocket.close(1000, null)
        }

        override fun onClosed(webSocket: WebSocket, code: Int, reason: String) = end(0)

        override fun onFailure(webSocket: WebSocket, t: Throwable, response: Response?) = end(response?.code?.takeIf { it != 101 } ?: 0)

        private fun end(status: Int) {
            ended = true
            open.remove(socket)
            closed(socket, status) // the core ignores those that it has closed
        }
    }

    private companion object {
        /** A redirect would take the token, which is a subprotocol, to another server. */
        val client: OkHttpClient by lazy { OkHttpClient.Builder().followRedirects(false).followSslRedirects(false).build() }
    }
}
