/** Draft trees as a session sends them. */

/**
 * Drafted tokens, parents before children. Parents count as on the wire: 0 is the last committed token, `i` the i-th drafted
 * token. The tree `a(b, c(d))` is tokens `[a, b, c, d]`, parents `[0, 1, 1, 3]`.
 */
export interface DraftTree {
  readonly tokens: readonly number[];
  readonly parents: readonly number[];
}
