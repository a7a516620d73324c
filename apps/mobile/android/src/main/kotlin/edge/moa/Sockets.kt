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
) {
    private val client = OkHttpClient()
    private val open = ConcurrentHashMap<Int, WebSocket>()

    fun connect(socket: Int, url: String, protocols: String) {
        val request = try {
            Request.Builder().url(url).apply { if (protocols.isNotEmpty()) header("Sec-WebSocket-Protocol", protocols) }.build()
        } catch (error: IllegalArgumentException) {
            return closed(socket, 0)
        }
        open[socket] = client.newWebSocket(request, object : WebSocketListener() {
            override fun onOpen(webSocket: WebSocket, response: Response) = opened(socket)

            override fun onMessage(webSocket: WebSocket, bytes: ByteString) = received(socket, bytes.toByteArray())

            override fun onClosing(webSocket: WebSocket, code: Int, reason: String) {
                webSocket.close(1000, null)
            }

            override fun onClosed(webSocket: WebSocket, code: Int, reason: String) = end(0)

            override fun onFailure(webSocket: WebSocket, t: Throwable, response: Response?) = end(response?.code ?: 0)

            private fun end(status: Int) {
                if (open.remove(socket) != null) closed(socket, status)
            }
        })
    }

    fun send(socket: Int, frame: ByteArray) {
        open[socket]?.send(frame.toByteString())
    }

    fun close(socket: Int) {
        open.remove(socket)?.close(1000, null)
    }
}
