import Foundation
import Network

/// Watches the network and the battery, and tells changes as the request `conditions` takes them. All happens on the queue.
final class DeviceConditions: @unchecked Sendable {
    private let queue: DispatchQueue
    private let tell: @Sendable ([String: Any]) -> Void
    private let monitor = NWPathMonitor()
    private var background = false
    private var metered = false
    private var network: (NWPath.Status, String?)?
    private var observer: NSObjectProtocol?

    init(
        on queue: DispatchQueue, _ tell: @escaping @Sendable ([String: Any]) -> Void,
        networkChanged: @escaping @Sendable () -> Void
    ) {
        self.queue = queue
        self.tell = tell
        observer = NotificationCenter.default.addObserver(forName: .NSProcessInfoPowerStateDidChange, object: nil, queue: nil) {
            [weak self] _ in queue.async { [weak self] in self?.changed() }
        }
        monitor.pathUpdateHandler = { [weak self] path in
            guard let self else { return }
            let now = (path.status, path.availableInterfaces.first?.name)
            // The first call reports the present network.
            if let before = network, before != now, path.status == .satisfied { networkChanged() }
            network = now
            metered = path.isExpensive || path.isConstrained
            changed()
        }
        monitor.start(queue: queue)
    }

    deinit { close() }

    func setBackground(_ background: Bool) {
        queue.async {
            self.background = background
            self.changed()
        }
    }

    func close() {
        monitor.cancel()
        if let observer { NotificationCenter.default.removeObserver(observer) }
    }

    private func changed() {
        tell(["background": background, "metered": metered, "lowPower": ProcessInfo.processInfo.isLowPowerModeEnabled])
    }
}
