import Foundation

/// The core's WebSockets, by number.
final class Sockets: NSObject, URLSessionWebSocketDelegate, @unchecked Sendable {
    private let opened: (Int) -> Void
    private let received: (Int, Data) -> Void
    private let closed: (Int, Int) -> Void
    private let lock = NSLock()
    private var tasks: [Int: URLSessionWebSocketTask] = [:]
    private lazy var session = URLSession(configuration: .default, delegate: self, delegateQueue: nil)

    init(opened: @escaping (Int) -> Void, received: @escaping (Int, Data) -> Void, closed: @escaping (Int, Int) -> Void) {
        self.opened = opened
        self.received = received
        self.closed = closed
    }

    func connect(_ socket: Int, url: String, protocols: [String]) {
        guard let url = URL(string: url) else { return closed(socket, 0) }
        let task = session.webSocketTask(with: url, protocols: protocols)
        task.taskDescription = String(socket)
        task.maximumMessageSize = 64 << 20  // a prompt's memory rows
        lock.withLock { tasks[socket] = task }
        task.resume()
    }

    func send(_ socket: Int, _ frame: Data) {
        lock.withLock { tasks[socket] }?.send(.data(frame)) { _ in }  // an error ends the task, too
    }

    func close(_ socket: Int) {
        lock.withLock { tasks.removeValue(forKey: socket) }?.cancel(with: .normalClosure, reason: nil)
    }

    /// End all; the session would keep this object otherwise.
    func close() {
        for socket in lock.withLock({ Array(tasks.keys) }) { close(socket) }
        session.finishTasksAndInvalidate()
    }

    private func receive(_ socket: Int, _ task: URLSessionWebSocketTask) {
        task.receive { [weak self] result in
            guard let self else { return }
            guard case .success(let message) = result else { return end(task) }  // closed by the server
            if case .data(let frame) = message { received(socket, frame) }
            receive(socket, task)
        }
    }

    func urlSession(_: URLSession, webSocketTask task: URLSessionWebSocketTask, didOpenWithProtocol _: String?) {
        guard let socket = number(of: task) else { return }
        opened(socket)
        receive(socket, task)
    }

    func urlSession(_: URLSession, task: URLSessionTask, didCompleteWithError _: Error?) { end(task) }

    private func end(_ task: URLSessionTask) {
        guard let socket = number(of: task), lock.withLock({ tasks.removeValue(forKey: socket) }) != nil else { return }
        let status = (task.response as? HTTPURLResponse)?.statusCode ?? 0
        closed(socket, status == 101 ? 0 : status)
    }

    /// A redirect would take the token, which is a subprotocol, to another server.
    func urlSession(
        _: URLSession, task _: URLSessionTask, willPerformHTTPRedirection _: HTTPURLResponse, newRequest _: URLRequest,
        completionHandler: @escaping (URLRequest?) -> Void
    ) { completionHandler(nil) }

    private func number(of task: URLSessionTask) -> Int? { task.taskDescription.flatMap(Int.init) }
}
