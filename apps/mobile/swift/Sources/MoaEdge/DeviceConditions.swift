import Foundation
import Network

/// Watches the network and the battery, and tells changes as the request `conditions` takes them.
final class DeviceConditions: @unchecked Sendable {
    private let tell: @Sendable ([String: Any]) -> Void
    private let monitor = NWPathMonitor()
    private let queue = DispatchQueue(label: "moa-edge.conditions")
    private var metered = false
    private var interfaces: [String]?
    private var observer: NSObjectProtocol?

    var background = false { didSet { changed() } }

    init(_ tell: @escaping @Sendable ([String: Any]) -> Void, networkChanged: @escaping @Sendable () -> Void) {
        self.tell = tell
        observer = NotificationCenter.default.addObserver(forName: .NSProcessInfoPowerStateDidChange, object: nil, queue: nil) {
            [weak self] _ in self?.changed()
        }
        monitor.pathUpdateHandler = { [weak self] path in
            guard let self else { return }
            let names = path.availableInterfaces.map(\.name)
            // The first call reports the present network.
            if let before = interfaces, before != names, path.status == .satisfied { networkChanged() }
            interfaces = names
            metered = path.isExpensive || path.isConstrained
            changed()
        }
        monitor.start(queue: queue)
    }

    deinit {
        monitor.cancel()
        if let observer { NotificationCenter.default.removeObserver(observer) }
    }

    private func changed() {
        tell(["background": background, "metered": metered, "lowPower": ProcessInfo.processInfo.isLowPowerModeEnabled])
    }
}
