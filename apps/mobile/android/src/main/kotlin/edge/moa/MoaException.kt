package edge.moa

/** An error with one sentence for the user; [kind] is its name in the runtime, such as `ConnectError`. */
class MoaException(val kind: String, message: String) : Exception(message)
