// Streams one request over gRPC, straight from the .proto files, and prints what came as one JSON line.
// usage: node generate.mjs ADDRESS PROTO_ROOT REQUEST_JSON
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, protoRoot, request] = process.argv.slice(2);
const definition = loader.loadSync("specdec/v1/generation_service.proto", {
  includeDirs: [protoRoot],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: false,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).specdec.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const answer = { text: "", token_ids: [], pieces: 0 };
const stream = client.Generate(JSON.parse(request), { deadline: Date.now() + 60_000 });
stream.on("data", (piece) => {
  answer.pieces += 1;
  answer.text += piece.text ?? "";
  answer.token_ids.push(...(piece.token_ids ?? []));
  for (const key of ["finish_reason", "usage", "speculation"]) {
    if (piece[key] !== undefined) answer[key] = piece[key];
  }
});
let failed = false;
stream.on("error", (error) => {
  failed = true;
  console.log(JSON.stringify({ code: grpc.status[error.code], message: error.details }));
  process.exitCode = 1;
});
stream.on("end", () => {
  if (!failed) console.log(JSON.stringify(answer));
  client.close();
});
