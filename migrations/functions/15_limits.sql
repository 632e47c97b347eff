-- role: relay_api
--
-- How large a value may be. SDKs refuse earlier, by their own settings; this holds for whoever calls a function by hand, so
-- that what a stolen login writes cannot fill the memory of those who read it, nor be unreadable beside what others wrote.
--
--   relay.check_size(what, bytes, most)  an error where that is too much
--   relay.check_json(what, json, most)   the same for JSON, by the text that readers get
--   relay.check_parts(headers, …)        the same for a batch of requests or results
--
-- Two limits are the installation's, in relay.installation, for whoever owns the tables to change; they hold from the
-- next call on:
--   max_value_bytes       a body of a request or a result, a payload of a chunk, params of a job; 8 MiB
--   max_checkpoint_bytes  a checkpoint, an outcome of a chunk; 1 MiB
-- The rest is fixed: headers 2 MiB (an SDK's are 1 MiB, before PostgreSQL puts spaces in), detail of an event or a bad row
-- 128 KiB (an SDK's 64), an error, a note or a name of who did it 8 KiB, a code and the name of a holder 200 bytes.
--
-- Internal. Verbs look at pg_column_size first, which costs nothing, and come here for what is not small: JSON of 64 bytes at
-- most may be a text of a megabyte at worst, for 1e131000 is short as a number and not as a text.

-- Guarantees: nothing, but an error where p_bytes is above p_most, or above a limit of the installation where that is 'value' or
--   'checkpoint'. Null is nothing.
-- Errors: S2022.
create or replace function relay.check_size(p_what text, p_bytes bigint, p_most text) returns void
language plpgsql stable
as $$
declare
  v_most bigint;
begin
  -- Less than either may be set to, so that no row is read for an ordinary value.
  if p_bytes <= 65536 and p_most in ('value', 'checkpoint') then
    return;
  end if;
  if p_most in ('value', 'checkpoint') then
    select case p_most when 'value' then i.max_value_bytes else i.max_checkpoint_bytes end into v_most from relay.installation i;
  else
    v_most := p_most::bigint;
  end if;
  if p_bytes > v_most then
    raise exception '% has % bytes; this installation allows %', p_what, p_bytes, v_most using errcode = 'S2022';
  end if;
end $$;

-- Guarantees: as check_size, for the text of p_json.
-- Errors: S2022; 54000 where the text is more than PostgreSQL can make.
create or replace function relay.check_json(p_what text, p_json jsonb, p_most text) returns void
language plpgsql stable
as $$
begin
  perform relay.check_size(p_what, octet_length(p_json::text), p_most);
end $$;

-- Guarantees: as check_size, for each value of the arrays; null is nothing.
-- Errors: S2022; 22P02 headers that are no JSON; 54000.
create or replace function relay.check_parts(p_headers text[], p_bodies bytea[], p_codes text[], p_messages text[]) returns void
language plpgsql stable
as $$
begin
  perform relay.check_size('a body', (select max(octet_length(u.body)) from unnest(p_bodies) as u (body)), 'value'),
          relay.check_size('a map of headers', (select max(octet_length(u.headers)) from unnest(p_headers) as u (headers)), '2097152'),
          relay.check_size('an error code', (select max(octet_length(u.code)) from unnest(p_codes) as u (code)), '200'),
          relay.check_size('an error message', (select max(octet_length(u.message)) from unnest(p_messages) as u (message)), '8192');
  -- Headers are strings; who gives numbers may give long ones.
  perform relay.check_size('a map of headers', (select max(octet_length(u.headers::jsonb::text)) from unnest(p_headers) as u (headers)
                                                where octet_length(u.headers) > 64), '2097152');
end $$;
