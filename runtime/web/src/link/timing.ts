/** How long to wait for what. */

/**
 * Seconds. A link is given up where nothing comes for `pingInterval + pingTimeout`, and where no Welcome comes for
 * `welcomeTimeout`.
 */
export interface Timing {
  readonly openTimeout: number;
  readonly welcomeTimeout: number;
  /** Silence after which the verifier is asked for a sign of life. */
  readonly pingInterval: number;
  readonly pingTimeout: number;
  readonly firstBackoff: number;
  readonly longestBackoff: number;
}

export const USUAL_TIMING: Timing = {
  openTimeout: 5,
  welcomeTimeout: 20,
  pingInterval: 4,
  pingTimeout: 4,
  firstBackoff: 0.25,
  longestBackoff: 4,
};
