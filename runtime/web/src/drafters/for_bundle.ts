/** What drafts with a bundle. */

import type { Manifest } from "../bundle/manifest.js";
import type { Backend } from "../engine/backend.js";
import { USUAL_MANNERS, type Manners } from "../loop/manners.js";
import { NgramMixture } from "./mixture.js";
import { MoaDrafter } from "./moa.js";

/** How a drafter is made, as a worker can be told. */
export interface DrafterPlan {
  readonly maxContext: number;
  readonly stopTokens: readonly number[];
  /** Whether what the graph expects is mixed with what the conversation says already, see {@link NgramMixture}. */
  readonly ngrams: boolean;
  readonly manners: Manners | null;
}

/** Of a drafter. */
export function drafterPlan({ maxContext, stopTokens, manners }: Manifest): DrafterPlan {
  return { maxContext, stopTokens, ngrams: true, manners: manners ?? USUAL_MANNERS };
}

/** Of what writes without a verifier: its cache follows the conversation only when it is asked for text. */
export function writerPlan({ maxContext, stopTokens, webWriter }: Manifest): DrafterPlan {
  return { maxContext: Math.min(maxContext, webWriter!.maxContext), stopTokens, ngrams: false, manners: null };
}

/** A drafter for one conversation; `backend`, a bundle's graph, may be shared by several. */
export function drafterOf({ maxContext, stopTokens, ngrams, manners }: DrafterPlan, backend: Backend): MoaDrafter {
  const mixture = ngrams ? new NgramMixture(stopTokens) : undefined;
  return new MoaDrafter(backend, { maxContext, stopTokens, mixture, manners });
}
