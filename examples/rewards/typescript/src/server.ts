// A complete reward service: loads the contract from the repository's .proto files, scores, ends on SIGTERM.

import path from "node:path";
import { fileURLToPath } from "node:url";

import * as grpc from "@grpc/grpc-js";
import * as protoLoader from "@grpc/proto-loader";

import { score } from "./arithmetic.js";

interface ScoreRequest {
  requestId: string;
  runId: string;
  groupId: string;
  promptText: string;
  metadataJson: string;
  items: { sampleId: string; text: string; tokenIds: number[] }[];
}

interface Score {
  status: "SCORE_STATUS_OK" | "SCORE_STATUS_ERROR";
  value?: number;
  parts?: Record<string, number>;
  error?: string;
}

const HOST = process.env.HOST ?? "127.0.0.1";
const PORT = process.env.PORT ?? "50060";
const PROTOS =
  process.env.PROTOS ?? path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../../../protos");
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
const GRACE_MS = 5000;

/** The right answer from the recipe's metadata: `Prompt(..., metadata={"answer": 42})`. */
function answerOf(request: ScoreRequest): string {
  const metadata: unknown = JSON.parse(request.metadataJson);
  const answer = (metadata as { answer?: unknown } | null)?.answer;
  if (typeof answer !== "number" && typeof answer !== "string") {
    throw new Error("metadata has no `answer`");
  }
  return String(answer);
}

function handleScore(
  call: grpc.ServerUnaryCall<ScoreRequest, { scores: Score[] }>,
  respond: grpc.sendUnaryData<{ scores: Score[] }>,
): void {
  let answer: string;
  try {
    answer = answerOf(call.request);
  } catch (error) {
    // No retry can help, so the group is void at once.
    respond({ code: grpc.status.INVALID_ARGUMENT, details: `${call.request.groupId}: ${error}` });
    return;
  }
  const scores = call.request.items.map((item): Score => {
    const value = score(item.text, answer);
    return { status: "SCORE_STATUS_OK", value, parts: { arithmetic: value } };
  });
  respond(null, { scores });
}

function load(): grpc.ServiceDefinition {
  const definition = protoLoader.loadSync("slipstream/v1/reward_service.proto", {
    includeDirs: [PROTOS],
    enums: String,
    defaults: true,
  });
  return definition["slipstream.v1.RewardService"] as grpc.ServiceDefinition;
}

const server = new grpc.Server({
  "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
});
server.addService(load(), { Score: handleScore });
server.bindAsync(`${HOST}:${PORT}`, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) {
    console.error(error.message);
    process.exit(1);
  }
  console.log(`listening on ${HOST}:${port}`);
});

function stop(): void {
  // Calls in hand are finished; those that take too long will be made again elsewhere.
  server.tryShutdown(() => process.exit(0));
  setTimeout(() => process.exit(0), GRACE_MS).unref();
}
process.on("SIGTERM", stop);
process.on("SIGINT", stop);
