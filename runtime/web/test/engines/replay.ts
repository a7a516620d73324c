/** The program of an engine that replays all vectors. */

import "../../src/text_encoding.js";

import "../client_table.test.js";
import "../drafts.test.js";
import "../figures.test.js";
import "../loop_traces.test.js";
import "../session_traces.test.js";
import "../texts.test.js";
import { runTests } from "./tests.js";

/** `report` is defined by a script before. */
const { report } = globalThis as unknown as { report(json: string): void };

void runTests((name, problem) => report(JSON.stringify([name, problem]))).then(() => report("null"));
