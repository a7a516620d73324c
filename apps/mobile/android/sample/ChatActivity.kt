package edge.moa.sample

import android.app.Application
import android.os.Bundle
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.TextView
import androidx.activity.ComponentActivity
import androidx.activity.viewModels
import androidx.lifecycle.AndroidViewModel
import androidx.lifecycle.DefaultLifecycleObserver
import androidx.lifecycle.LifecycleOwner
import androidx.lifecycle.ProcessLifecycleOwner
import androidx.lifecycle.lifecycleScope
import edge.moa.AnswerEvent
import edge.moa.MoaChat
import edge.moa.MoaException
import java.io.File
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.cancel
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch

data class Screen(val status: String = "starting", val answer: String = "")

/** The chat, which outlives the activity when the phone is turned. */
class ChatModel(application: Application) : AndroidViewModel(application), DefaultLifecycleObserver {
    val screen = MutableStateFlow(Screen())

    /** Not `viewModelScope`, which is cancelled before [onCleared]: a collector that is cancelled ends the answer. */
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.Main.immediate)
    private var chat: MoaChat? = null
    private var answering: Job? = null
    private var background = false

    init {
        ProcessLifecycleOwner.get().lifecycle.addObserver(this)
        scope.launch {
            closing?.join()
            val bundle = File(application.filesDir, "bundle") // copied or downloaded there before
            try {
                val opened = MoaChat.open(application, bundle, "wss://192.168.1.2:8765", store = "sample") { scope.launch { show(it) } }
                opened.setBackground(background)
                chat = opened
                if (opened.hasPending) follow(opened.pending())
            } catch (error: MoaException) {
                screen.update { it.copy(status = error.message.orEmpty()) }
            }
        }
    }

    fun send(text: String) {
        chat?.let { follow(it.send(text)) }
    }

    override fun onStart(owner: LifecycleOwner) = tellBackground(false)

    override fun onStop(owner: LifecycleOwner) = tellBackground(true)

    override fun onCleared() {
        ProcessLifecycleOwner.get().lifecycle.removeObserver(this)
        closing = scope.launch {
            try {
                chat?.close() // first: then the next run continues the answer
            } finally {
                scope.cancel()
            }
        }
    }

    private fun tellBackground(now: Boolean) {
        background = now
        chat?.setBackground(now)
    }

    private fun follow(events: Flow<AnswerEvent>) {
        answering?.cancel()
        var confirmed = ""
        answering = scope.launch {
            try {
                events.collect { event ->
                    if (event is AnswerEvent.Update) {
                        confirmed = confirmed.take(event.start) + event.text
                        screen.update { it.copy(answer = confirmed + event.tentative) }
                    }
                    show(event)
                }
            } catch (error: MoaException) {
                screen.update { it.copy(status = error.message.orEmpty()) }
            }
        }
    }

    private fun show(event: AnswerEvent) = screen.update {
        when (event) {
            is AnswerEvent.Finished -> it.copy(answer = event.text)
            is AnswerEvent.Link -> it.copy(status = "${event.status}: ${event.detail}")
            is AnswerEvent.Paused -> it.copy(status = "waiting: ${event.reason}")
            is AnswerEvent.Disagreement, is AnswerEvent.Update -> it
        }
    }

    private companion object {
        var closing: Job? = null
    }
}

/** One screen: a chat that goes on without a network, and after a restart. */
class ChatActivity : ComponentActivity() {
    private val model: ChatModel by viewModels()

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        val status = TextView(this)
        val answer = TextView(this)
        val question = EditText(this)
        val send = Button(this).apply { text = "Send" }
        setContentView(LinearLayout(this).apply {
            orientation = LinearLayout.VERTICAL
            listOf(status, answer, question, send).forEach(::addView)
        })
        send.setOnClickListener {
            model.send(question.text.toString())
            question.text.clear()
        }
        lifecycleScope.launch {
            model.screen.collect {
                status.text = it.status
                answer.text = it.answer
            }
        }
    }
}
