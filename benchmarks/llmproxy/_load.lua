-- A load for wrk: requests of many trajectories, each with its own x-trajectory-id and one in flight at a time.
-- Arguments: the file that holds the body; afterwards prints one line of JSON.
local threads = 0
function setup(thread)
  thread:set("number", threads)
  threads = threads + 1
end

function init(args)
  local file = assert(io.open(args[1], "rb"))
  local body = file:read("*a")
  file:close()
  prepared = {}
  for n = 1, 4096 do
    local headers = {
      ["Content-Type"] = "application/json",
      ["x-trajectory-id"] = "t" .. number .. "-" .. n,
      ["x-task"] = "default",
    }
    prepared[n] = wrk.format("POST", "/v1/completions", headers, #args[1] > 0 and body or "")
    if #body > 65536 and n == 64 then break end
  end
  count = 0
end

function request()
  count = count + 1
  return prepared[(count - 1) % #prepared + 1]
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "seconds": %.6f, "p50_us": %d, "p99_us": %d, "errors": %d, "bad_status": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
