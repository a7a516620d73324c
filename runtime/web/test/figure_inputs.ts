/** Inputs of the vectors' cases as values of the runtime. */

import type { Budget, Prices, Sampling } from "../src/index.js";
import { ours, type Value } from "./vectors.js";

export type Fields = { [key: string]: Value };

export function samplingOf(given: Fields): Sampling {
  const said = ours<Omit<Sampling, "seed"> & { seed: number }>(given["sampling"]!);
  return { ...said, seed: BigInt(said.seed) };
}

export function budgetFrom(said: Value): Budget {
  const budget = ours<Budget>(said);
  return { ...budget, prices: ours<Prices>(budget.prices as unknown as Value) };
}
