import Foundation

/// An error with one sentence for the user. `name` is its kind in the runtime: `ConnectError`, `StoreError`, `ChatError`,
/// `ContextFullError`, `ChatTemplateError`, `BundleError`, `EngineError`, others of `MoaError`, or `Defect` for an error of the library.
public struct MoaError: LocalizedError, Sendable {
    public let name: String
    public let message: String

    public var errorDescription: String? { message }
}
