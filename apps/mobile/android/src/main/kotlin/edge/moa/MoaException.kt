package edge.moa

/**
 * An error with one sentence for the user. [kind] is its name in the runtime: `ConnectError`, `StoreError`, `ChatError`,
 * `ContextFullError`, `ChatTemplateError`, `BundleError`, `EngineError`, others of `MoaError`, or `Defect` for an error of the library.
 */
class MoaException(val kind: String, message: String) : Exception(message)
