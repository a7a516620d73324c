import Foundation

/// An error with one sentence for the user; `name` is its kind in the runtime, such as `ConnectError`.
public struct MoaError: LocalizedError, Sendable {
    public let name: String
    public let message: String

    public var errorDescription: String? { message }
}
