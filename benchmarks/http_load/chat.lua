-- Each request has the same long system prompt and a last message of its own.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local system = string.rep("You are a helpful assistant that answers briefly and well. ", 40)
local before = '{"model":"smol","messages":[{"role":"system","content":"' .. system .. '"},{"role":"user","content":"question '
local salt, n = os.time(), 0
request = function()
  n = n + 1
  return wrk.format(nil, "/v1/chat/completions", nil, before .. salt .. "-" .. n .. '"}],"max_tokens":8}')
end
