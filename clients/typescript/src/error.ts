import { status, type ServiceError } from "@grpc/grpc-js";

/** Name of a gRPC status, such as "INVALID_ARGUMENT". */
export type StatusName = Exclude<keyof typeof status, "OK">;

/** A call that the server refused or could not finish. */
export class TandemError extends Error {
  override readonly name = "TandemError";

  constructor(
    /** The gRPC status. */
    readonly code: StatusName,
    message: string,
    /** The field of the request that is wrong, where the server names one. */
    readonly param: string | undefined,
    /** Seconds after which to try again, where the server tells. */
    readonly retryAfterS: number | undefined,
    options: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** The error of a failed call; what is no gRPC status stays as it is. */
export function errorOf(cause: unknown): unknown {
  if (!(cause instanceof Error) || !("code" in cause) || !("metadata" in cause)) return cause;
  const { code, details, metadata } = cause as ServiceError;
  const [param, retryAfterS] = ["tandem-param", "tandem-retry-after-s"].map((key) => metadata.get(key)[0]?.toString());
  const name = (status[code] ?? "UNKNOWN") as StatusName;
  return new TandemError(name, details, param, retryAfterS === undefined ? undefined : Number(retryAfterS), { cause });
}
