export { TandemClient } from "./client.js";
export type { CallOptions, ClientOptions, GenerateInput, Generation, Input, PromptInput, Sample, TlsOptions } from "./client.js";
export { TandemError } from "./error.js";
export type { StatusName } from "./error.js";
export * from "./generated/types/specdec/v1/generation_service.js";
export {
  FinishReason,
  VerificationRule,
  type ModelInfo,
  type PositionLogprobs,
  type SamplingParams,
  type StructuredOutputs,
  type TokenLogprob,
} from "./generated/types/specdec/v1/types.js";
