-- role: relay_api
--
-- Rights. PostgreSQL grants EXECUTE on a new function to PUBLIC; here it is taken back from all, then given by name.
-- A function that is named neither below nor in its room's file of rights can be called by relay_api alone.

do $$
declare
  v_function regprocedure;
begin
  for v_function in
    select p.oid from pg_catalog.pg_proc p
    where p.pronamespace = 'relay'::regnamespace and p.proowner = 'relay_api'::regrole
  loop
    execute format('revoke all on function %s from public', v_function);
  end loop;
end $$;

grant execute on function
  relay.now(), relay.session_age(), relay.my_bindings(), relay.channel(text, text, text), relay.ring(text[], text[], text[], text[])
to relay_gateway, relay_worker, relay_operator;
