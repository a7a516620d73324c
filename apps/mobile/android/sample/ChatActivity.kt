package edge.moa.sample

import android.os.Bundle
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.TextView
import androidx.activity.ComponentActivity
import androidx.lifecycle.lifecycleScope
import edge.moa.AnswerEvent
import edge.moa.MoaChat
import edge.moa.MoaException
import java.io.File
import kotlinx.coroutines.Job
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.launch

/** One screen: a chat that goes on without a network, and after a restart. */
class ChatActivity : ComponentActivity() {
    private lateinit var answer: TextView
    private lateinit var status: TextView
    private var chat: MoaChat? = null
    private var answering: Job? = null

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        status = TextView(this)
        answer = TextView(this)
        val question = EditText(this)
        val send = Button(this).apply { text = "Send" }
        setContentView(LinearLayout(this).apply {
            orientation = LinearLayout.VERTICAL
            listOf(status, answer, question, send).forEach(::addView)
        })
        send.setOnClickListener {
            val text = question.text.toString()
            question.text.clear()
            chat?.let { follow(it.send(text)) }
        }
        lifecycleScope.launch {
            val bundle = File(filesDir, "bundle") // copied or downloaded there before
            try {
                val opened = MoaChat.open(this@ChatActivity, bundle, "wss://192.168.1.2:8765", store = "sample") { event ->
                    if (event is AnswerEvent.Link) runOnUiThread { status.text = "${event.status}: ${event.detail}" }
                }
                chat = opened
                if (opened.hasPending) follow(opened.pending())
            } catch (error: MoaException) {
                status.text = error.message
            }
        }
    }

    override fun onStart() {
        super.onStart()
        chat?.setBackground(false)
    }

    override fun onStop() {
        super.onStop()
        chat?.setBackground(true)
    }

    private fun follow(events: Flow<AnswerEvent>) {
        answering?.cancel()
        answering = lifecycleScope.launch {
            var confirmed = ""
            try {
                events.collect { event ->
                    when (event) {
                        is AnswerEvent.Update -> {
                            confirmed = confirmed.take(event.start) + event.text
                            answer.text = confirmed + event.tentative
                        }
                        is AnswerEvent.Finished -> answer.text = event.text
                        is AnswerEvent.Link -> status.text = "${event.status}: ${event.detail}"
                        is AnswerEvent.Paused -> status.text = "waiting: ${event.reason}"
                        is AnswerEvent.Disagreement -> Unit
                    }
                }
            } catch (error: MoaException) {
                status.text = error.message
            }
        }
    }
}
