-- A load for wrk: requests of many trajectories, each with one in flight at a time; prints one line of JSON at the end.
-- Arguments: the path, the file that holds the body, and "named" where a header says the trajectory.
local threads = 0
function setup(thread)
  thread:set("number", threads)
  threads = threads + 1
end

function init(args)
  local file = assert(io.open(args[2], "rb"))
  local body = file:read("*a")
  file:close()
  prepared = {}
  for n = 1, (#body > 65536 and 8 or 32768) do
    local headers = { ["Content-Type"] = "application/json" }
    if args[3] == "named" then
      headers["x-trajectory-id"] = "t" .. number .. "-" .. n
      headers["x-task"] = "default"
    end
    prepared[n] = wrk.format("POST", args[1], headers, body)
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
    '{"requests": %d, "seconds": %.6f, "p50_us": %d, "p99_us": %d, "errors": %d, "bad": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
