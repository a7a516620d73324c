import MoaEdge
import SwiftUI

/// One screen: a chat that goes on without a network, and after a restart.
@main
struct SampleApp: App {
    var body: some Scene { WindowGroup { ChatView() } }
}

struct ChatView: View {
    @Environment(\.scenePhase) private var phase
    @State private var chat: MoaChat?
    @State private var confirmed = ""
    @State private var tentative = ""
    @State private var status = "starting"
    @State private var question = ""
    @State private var answering: Task<Void, Never>?

    var body: some View {
        VStack(alignment: .leading) {
            Text(status).font(.caption)
            ScrollView { Text(confirmed) + Text(tentative).foregroundStyle(.secondary) }
            HStack {
                TextField("Message", text: $question)
                Button("Send") { ask() }.disabled(chat == nil)
            }
        }
        .padding()
        .task { await start() }
        .onChange(of: phase) { chat?.setBackground(phase == .background) }
    }

    private func start() async {
        let bundle = Bundle.main.url(forResource: "bundle", withExtension: nil)!
        do {
            let opened = try await MoaChat.open(bundle: bundle, server: URL(string: "wss://192.168.1.2:8765")!, store: "sample") { event in
                if case .link(let link) = event { Task { @MainActor in status = "\(link.status): \(link.detail)" } }
            }
            chat = opened
            if opened.hasPending { answering = Task { await follow(opened.pending()) } }
        } catch {
            status = error.localizedDescription
        }
    }

    private func ask() {
        guard let chat else { return }
        answering?.cancel()
        let text = question
        question = ""
        answering = Task { await follow(chat.send(text)) }
    }

    private func follow(_ events: MoaChat.Events) async {
        (confirmed, tentative) = ("", "")
        do {
            for try await event in events {
                switch event {
                case .update(let text, let start, let rest, _):
                    confirmed = String(decoding: Array(confirmed.utf16.prefix(start)), as: UTF16.self) + text
                    tentative = rest
                case .finished(let text, _, _): (confirmed, tentative) = (text, "")
                case .link(let link): status = "\(link.status): \(link.detail)"
                case .paused(let reason): status = "waiting: \(reason)"
                case .disagreement: break
                }
            }
        } catch {
            status = error.localizedDescription
        }
    }
}
